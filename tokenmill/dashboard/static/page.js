"use strict";
// The page updates its inside by htmx, every two seconds. Here: what htmx and idiomorph are told, and what is
// shown while the server does not answer.

const morphing = Idiomorph.defaults.callbacks;
// Charts draw themselves, and what a person has opened stays open.
morphing.beforeNodeMorphed = (old) => !(old instanceof Element && old.hasAttribute("data-keep"));
morphing.beforeAttributeUpdated = (name, node) => !(name === "open" && node.tagName === "DETAILS");

const offline = document.getElementById("offline");

function setOffline(away) {
  offline.hidden = !away;
  document.body.classList.toggle("stale", away);
}

const isUpdate = (event) => event.detail.requestConfig?.verb === "get";

for (const name of ["htmx:sendError", "htmx:timeout", "htmx:responseError"]) {
  document.body.addEventListener(name, () => setOffline(true));
}
document.body.addEventListener("htmx:afterOnLoad", (event) => {
  if (event.detail.xhr.status === 200) setOffline(false);
});
document.body.addEventListener("htmx:beforeRequest", (event) => {
  if (document.hidden && isUpdate(event)) event.preventDefault();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) htmx.trigger("#main", "refresh");
});

// The word of an action that led here is said once.
const address = new URL(location.href);
if (address.searchParams.has("done")) {
  address.searchParams.delete("done");
  history.replaceState(null, "", address);
}
