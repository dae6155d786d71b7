"""Ours beside another engine on a GPU: what is carried there arrives whole, and turns end when the time is up."""

import json
import os
import shlex
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.bench.gpu import beside, vllm_turns
from ops.bench.gpu.pack_vllm import DamagedPiecesError, pack, unpack
from ops.bench.kernels import flash_attention_3
from ops.bench.kernels.paged import Peer, attention_cases
from ops.bench.make import SHAPES
from ops.bench.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
#: Answers every turn, but one of 1,024 sequences at once: then the time is up for the process {pid}, and it hangs.
RUNNER = """
import json, os, signal, sys
print("READY", flush=True)
for line in sys.stdin:
    if {hangs} and "1024" in sys.argv:
        os.kill({pid}, signal.SIGALRM)
        signal.pause()
    workload = json.load(open(json.loads(line)["workload"]))
    outputs = [[7] * seq["max_tokens"] for seq in workload["seqs"]]
    print("RESULT " + json.dumps({{"tok_s": 10.0, "outputs": outputs}}), flush=True)
"""

#: The arguments of vLLM 0.26's operator that the stand-in has no use for.
FLASH_ATTENTION_3 = (
    "Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, "
    "int? max_seqlen_q, int? max_seqlen_k, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "int window_size_left, int window_size_right, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, "
    "int cp_rank, Tensor? cp_tot_seqused_k"
)


def command(*, hangs: bool) -> str:
    """A stand-in for a runner, without an engine."""
    text = RUNNER.format(pid=os.getpid(), hangs=hangs)
    return f"{shlex.quote(sys.executable)} -c {shlex.quote(text)}"


def make_wheel(path: Path, **files: bytes) -> Path:
    """A wheel with these files below vllm/, by name without the suffix .py."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"vllm/{name}.py", content)
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", b"needed")
        archive.writestr("vllm/_moe_C_stable_libtorch.abi3.so", b"experts")
        archive.writestr("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", b"other devices")
        archive.writestr("vllm-1.data/scripts/vllm", b"a script")
        archive.writestr("vllm-1.data/purelib/other.py", b"beside it")
    return path


def test_pieces_become_the_wheels_files_again(tmp_path: Path) -> None:
    content = bytes(range(256)) * 8
    wheel = make_wheel(tmp_path / "vllm-1.whl", llm=content)
    pieces = pack([wheel], tmp_path / "pieces", piece_bytes=300)
    assert len(pieces) > 1
    assert max(piece.stat().st_size for piece in pieces) <= 300
    site = tmp_path / "site"
    unpack(tmp_path / "pieces", site)
    assert (site / "vllm/llm.py").read_bytes() == content
    names = {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}
    assert names == {
        "vllm/llm.py",
        "vllm/_C_stable_libtorch.abi3.so",
        "other.py",
        "xgrammar/__init__.py",
    }


@pytest.mark.parametrize("harm", ["missing", "changed"])
def test_a_harmed_piece_is_named(harm: str, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "vllm-1.whl", llm=b"text")
    piece = pack([wheel], tmp_path / "pieces", piece_bytes=100)[1]
    if harm == "missing":
        piece.unlink()
    else:
        piece.write_bytes(piece.read_bytes()[:-1] + b"?")
    with pytest.raises(DamagedPiecesError, match=piece.name):
        unpack(tmp_path / "pieces", tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_workloads_keep_what_the_first_row_wants(tmp_path: Path) -> None:
    files = beside.write_workloads(tmp_path, dry_run=True)
    workloads = [Workload.read(file) for own in files.values() for file in own]
    wanted = {workload.name: workload.first_logprobs for workload in workloads}
    assert wanted.pop("256, one with log probabilities") == 5
    assert set(wanted.values()) == {0}
    beginnings = {tuple(workload.prompts[0][:3]) for workload in workloads}
    assert len(beginnings) == len(workloads)
    for own in files.values():
        for file in own:
            warm_up = Workload.read(beside.warm_up_file(file))
            assert len(warm_up.lengths) <= beside.WARM_UP_ROWS


class StandIn:
    """vLLM's `LLM`, without a model: token 7 is always the next one."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.params: list[SimpleNamespace] = []

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[SimpleNamespace]:
        """Answer to the lengths asked for."""
        self.params = params
        answers = [[7] * each.max_tokens for each in params]
        assert all(prompt.keys() == {"prompt_token_ids"} for prompt in prompts)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens)]) for tokens in answers]


def test_vllms_runner_asks_for_full_answers_and_for_what_the_first_row_wants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StandIn] = []

    def make(**settings: Any) -> StandIn:
        made.append(StandIn(**settings))
        return made[-1]

    fake = SimpleNamespace(LLM=make, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in ("VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE", "VLLM_LOGGING_STREAM"):
        monkeypatch.setenv(name, "1")
    Workload("few", "tiny", [[1, 2], [3]], [5, 2], first_logprobs=3).write(tmp_path / "few.json")
    given = beside.Given(tmp_path, "bfloat16", 64, 2**20, rounds=1)
    options = shlex.split(given.options(max_num_seqs=256).replace("--turns", ""))
    files = ["--workload", str(tmp_path / "few.json"), "--out", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["vllm_turns", *options, *files])
    vllm_turns.main()
    assert json.loads((tmp_path / "out.json").read_text())["outputs"] == [[7] * 5, [7] * 2]
    settings = made[0].settings
    assert (settings["max_num_seqs"], settings["kv_cache_memory_bytes"]) == (256, 2**20)
    first, second = made[0].params
    assert first.logprobs == 3
    assert not hasattr(second, "logprobs")
    assert (second.temperature, second.ignore_eos) == (0.6, True)


@pytest.mark.processes
def test_whole_rounds_are_known_when_an_engine_hangs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in for 1,024 sequences lets the time be up, and never answers."""
    files = beside.write_workloads(tmp_path, dry_run=True)
    given = beside.Given(tmp_path, "float32", 64, 2**20, rounds=2)
    commands = {beside.OURS: command(hangs=False), "peer": command(hangs=True)}
    records: list[beside.Record] = []

    def measure() -> None:
        with beside.time_limit(60):
            for record in beside.measure(commands, given, files, tmp_path):
                records.append(record)

    with pytest.raises(beside.TimeIsUpError):
        measure()
    assert len(records) == 2 * 2 * len(files[256])
    beside.print_results(records)
    table = capsys.readouterr().out
    for file in files[256]:
        assert f"| {Workload.read(file).name}" in table
    beside.write_results(records, tmp_path / "beside.json")
    kept = json.loads((tmp_path / "beside.json").read_text())["beside"]
    assert [run["tok_s"] for run in kept] == [10.0] * len(records)


@pytest.mark.long
def test_the_dry_run_goes_the_whole_way_with_our_engine_as_the_peer(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ops.bench.gpu.beside", "--dry-run", "--rounds", "1"),
            *("--folder", str(tmp_path), "--peer", beside.OURS_COMMAND),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout
    records = json.loads((tmp_path / "beside.json").read_text())["beside"]
    assert len(records) == 2 * sum(map(len, beside.SHAPES_BY_SEQS.values()))
    assert "| 256, one with log probabilities" in done.stdout


def attend_plainly(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    is_causal: bool,
    **rest: Any,
) -> list[Tensor]:
    """Stand in for FlashAttention 3's operator, whose other arguments are given too."""
    names = {argument.split()[-1] for argument in FLASH_ATTENTION_3.split(",")}
    assert {*rest} == names
    assert is_causal
    heads_of_group = q.shape[1] // k.shape[2]
    for seq, context_len in enumerate(seqused_k.tolist()):
        queries = slice(*cu_seqlens_q[seq : seq + 2].tolist())
        blocks = page_table[seq].long()
        keys = k[blocks].flatten(0, 1)[:context_len].repeat_interleave(heads_of_group, 1)
        values = v[blocks].flatten(0, 1)[:context_len].repeat_interleave(heads_of_group, 1)
        num_queries = queries.stop - queries.start
        scores = torch.einsum("qhd,khd->hqk", q[queries], keys) * softmax_scale
        unseen = torch.ones(num_queries, context_len, dtype=torch.bool)
        scores.masked_fill_(unseen.triu(1 + context_len - num_queries), -torch.inf)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return [out]


def test_flash_attention_3_runs_our_cases_of_attention_and_must_agree() -> None:
    """Behind each case of ours comes the same one of the library. One that sees a token too few is noticed."""
    pytest.importorskip("triton", reason="triton is not installed, so its kernels cannot run")
    on_cpu = torch.device("cpu")

    def cases(attention: Any) -> list[str]:
        peer = Peer("FlashAttention 3", partial(flash_attention_3.bind, attention))
        made = attention_cases(SHAPES["tiny"], on_cpu, torch.float32, tiny=True, peer=peer)
        return [case.name for case in made]

    ours, theirs, *others = cases(attend_plainly)
    assert theirs == f"FlashAttention 3, {ours}"
    assert len(others) == 2

    def attend_to_fewer(*, seqused_k: Tensor, **arguments: Any) -> list[Tensor]:
        return attend_plainly(seqused_k=seqused_k - 1, **arguments)

    with pytest.raises(AssertionError, match="not close"):
        cases(attend_to_fewer)
