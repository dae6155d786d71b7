"use strict";
// htmx updates the inner part of the page every two seconds. This file has the settings of htmx and idiomorph, the banner
// for a server that does not answer, the keys, the ticked jobs, and the local times.

const morphing = Idiomorph.defaults.callbacks;
// An update leaves the charts alone, which draw themselves, and everything that a person has opened, ticked or typed.
morphing.beforeNodeMorphed = (old) => !(old instanceof Element && old.hasAttribute("data-keep"));
morphing.beforeAttributeUpdated = (name, node) =>
  !((name === "open" && node.tagName === "DETAILS") || ((name === "checked" || name === "value") && node.matches?.("input:not([type=hidden])")));

const offline = document.getElementById("offline");
const main = document.getElementById("main");

function setOffline(away) {
  offline.hidden = !away;
  document.body.classList.toggle("stale", away);
}

const isUpdate = (event) => event.detail.requestConfig?.verb === "get";
const ticked = () => main.querySelectorAll("input[name=job]:checked");

for (const name of ["htmx:sendError", "htmx:timeout", "htmx:responseError"]) {
  document.body.addEventListener(name, () => setOffline(true));
}
document.body.addEventListener("htmx:afterOnLoad", (event) => {
  if (event.detail.xhr.status === 200) setOffline(false);
});
document.body.addEventListener("htmx:beforeRequest", (event) => {
  // While jobs are ticked, the list must not move beneath the pointer.
  if (isUpdate(event) && (document.hidden || ticked().length)) event.preventDefault();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) htmx.trigger("#main", "refresh");
});

// The outcome of an action is shown once: without the parameter, a reload does not show it again.
const address = new URL(location.href);
if (address.searchParams.has("done")) {
  address.searchParams.delete("done");
  history.replaceState(null, "", address);
}

// Ticked jobs.
function showTicked() {
  const boxes = [...main.querySelectorAll("input[name=job]")];
  const all = main.querySelector("[data-tick-all]");
  const paused = main.querySelector(".paused");
  const count = ticked().length;
  if (all) {
    all.checked = count > 0 && count === boxes.length;
    all.indeterminate = count > 0 && count < boxes.length;
  }
  if (paused) paused.hidden = count === 0;
  const remove = main.querySelector("[data-delete-ticked]");
  if (remove) remove.textContent = count ? `Delete ${count} ${count === 1 ? "job" : "jobs"}` : "Delete ticked jobs";
}
main.addEventListener("change", (event) => {
  if (event.target.matches("[data-tick-all]")) {
    for (const box of main.querySelectorAll("input[name=job]")) box.checked = event.target.checked;
  }
  showTicked();
});
document.body.addEventListener("htmx:afterRequest", (event) => {
  if (isUpdate(event) || !event.detail.successful) return;
  for (const box of ticked()) box.checked = false;
  showTicked();
});
document.body.addEventListener("htmx:afterSettle", showTicked);

// Keys.
const help = document.getElementById("help");
document.getElementById("help-button").addEventListener("click", () => help.showModal());

function go(step) {
  const rows = [...main.querySelectorAll("[data-row]")].filter((row) => row.querySelector("a, input"));
  if (!rows.length) return;
  const now = rows.findIndex((row) => row.contains(document.activeElement));
  const next = now < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.max(0, Math.min(rows.length - 1, now + step));
  (rows[next].querySelector("a") ?? rows[next].querySelector("input")).focus();
  rows[next].scrollIntoView({ block: "nearest" });
}

const keys = {
  j: () => go(1),
  k: () => go(-1),
  x: () => document.activeElement?.closest("[data-row]")?.querySelector("input[name=job]")?.click(),
  "/": () => document.getElementById("search").focus(),
  "?": () => help.showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input:not([type=checkbox]), textarea, select")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const act = keys[event.key];
  if (!act) return;
  event.preventDefault();
  act();
});

// Times are written in UTC. The pointer or the focus shows the reader's own.
function showLocal(event) {
  const time = event.target.closest?.("time[datetime]");
  if (time) time.title = new Date(time.dateTime).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
}
document.addEventListener("pointerover", showLocal);
document.addEventListener("focusin", showLocal);
