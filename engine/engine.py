"""Engine: takes requests, steps the model, and returns completions."""

import logging
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self

from tqdm import tqdm

from engine.checkpoint.adapter_folder import AdapterFolder
from engine.checkpoint.fingerprint import ModelIdentity
from engine.checkpoint.folder import resolve_model
from engine.checkpoint.heads import read_classes
from engine.checkpoint.pooling import read_pooling
from engine.errors import (
    AdapterGone,
    DuplicateRequest,
    EngineBusy,
    EngineClosed,
    InvalidPrompt,
    InvalidRequest,
    UnsupportedModel,
    UnsupportedTask,
)
from engine.models.load import generates, read_supported
from engine.run.adapters import Adapters
from engine.run.check_machine import check_support
from engine.run.config import EngineConfig, may_read_pictures, model_identity
from engine.run.device import resolve_device
from engine.run.dtype import served_dtype
from engine.run.forward.adapter_loader import check_takes_adapters
from engine.run.forward.memory import give_back_memory
from engine.run.forward.model_runner import ModelRunner
from engine.run.forward.pictures.reader import PictureReader, find_reader
from engine.run.forward.pictures.waiting import PictureQueue
from engine.run.forward.runner import Runner
from engine.run.intake import Request, Scores, numbered
from engine.run.kinds.request_kind import LoadedModel, NewRequest, RequestKind
from engine.run.kinds.table import RequestKinds
from engine.run.new_sequences import NewSequences
from engine.run.partial_texts import GrowingText, PartialTexts
from engine.run.stepper import Stepper
from engine.sampling.request_kinds import PoolingParams, RequestParams
from engine.sampling.sampling_params import SamplingParams
from engine.schedule.block_manager import BlockManager
from engine.schedule.outputs import (
    Completion,
    EngineStats,
    LogLikelihood,
    PartialText,
    RequestProgress,
)
from engine.schedule.pictures import PromptPictures
from engine.schedule.prepared_prompt import ROOT, PreparedPrompt
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence import Sequence, SequenceStatus, request_progress
from engine.schedule.snapshots import Snapshots
from engine.tensor_parallel.rank_group import StartRunner, start_own_runner
from engine.text.chat_templates import WITH_PICTURES
from engine.text.prompts import Prompt, PromptReader, pictures_in, pictures_of
from engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

UNCUT = SamplingParams()


@dataclass(frozen=True)
class _Unfinished:
    """A request that is in the engine.

    seqs: the request's sequences that have given no completion yet.
    growing_texts: by sample index, the texts that are read while they grow.
    """

    kind: RequestKind[Any]
    seqs: list[Sequence]
    growing_texts: dict[int, GrowingText] = field(default_factory=dict)


class Engine:
    """A model with its KV pool, stepping one continuous batch.

    Call it from one thread only, except `prepare`, `prepare_chat`, `prepare_grammar` and `chat_token_ids`.
    Raises ConfigError or a subclass (ModelNotFound, UnsupportedModel, MissingWeights, WeightMismatch,
    DamagedWeights) if it cannot start. Use it in a `with` block or call `close()`; later calls raise EngineClosed.
    Once a process has taken a step, a child forked from it cannot: torch's threads do not exist there.

    start_runner: makes the runner from this configuration, the model's configuration and its folder; for benchmarks.
    """

    def __init__(self, config: EngineConfig, *, start_runner: StartRunner | None = None) -> None:
        folder = resolve_model(config.model)
        model, path = read_supported(folder, config.model_path)
        check_support(config, model.dtype)
        adapter_folder = AdapterFolder(config.adapters)
        if config.adapters is not None:
            check_takes_adapters(config.adapters, path)
        self._reader: PictureReader | None = None
        if may_read_pictures(config):
            model, path, self._reader = find_reader(folder, model, path)
        logger.info("%s %s", model.whole or model.architecture, path)
        if model.quantization is not None and path.decoder is None:
            logger.info(
                "quantized weights (%s) are unpacked to %s when they are read, and take its memory",
                model.quantization,
                served_dtype(config.dtype, model.dtype, config.device).name,
            )
        classes = read_classes(model)
        pooling = read_pooling(folder, model, config.pooling) if classes is None else None
        has_lm_head = generates(folder, model, path, embeds=pooling is not None)
        self.generates = has_lm_head
        self.config = config
        self._tokenizer = Tokenizer(folder, config.chat_template)
        self._sequences = NewSequences(self._tokenizer, model.eos_token_ids, model.vocab_size)
        # the grammars read a large vocabulary while the runner loads the weights
        with self._sequences.grammars.begun(self.generates):
            self._live_runner: Runner | None = (start_runner or start_own_runner)(
                config, model, folder
            )
        self._picture_queue: PictureQueue | None = None
        if self._reader is not None:
            self._read_pictures(self._reader)
        pool = self._live_runner.pool_size
        self._scheduler = Scheduler(
            BlockManager(
                pool.num_blocks,
                config.block_size,
                enable_prefix_caching=config.enable_prefix_caching and not path.is_single_pass,
                snapshots=None if pool.states is None else Snapshots(*pool.states),
            ),
            max_num_seqs=config.num_seqs if pool.states is None else pool.states.num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=pool.max_model_len,
            batches_admissions=self._live_runner.has_graphs,
            in_one_step=path.is_single_pass,
        )
        self._adapters = Adapters(
            adapter_folder, self._live_runner, config.max_adapters, hold=self._scheduler.hold
        )
        self._prompts = PromptReader(self._tokenizer, model.vocab_size, pool.max_model_len)
        self._kinds = RequestKinds(
            LoadedModel(
                config=config,
                model=model,
                generates=self.generates,
                classes=classes,
                pooling=pooling,
                tokenizer=self._tokenizer,
                prompts=self._prompts,
                sequences=self._sequences,
                keys_of=self._scheduler.blocks.keys_of,
            )
        )
        self._partial_texts = PartialTexts(self._tokenizer, self._sequences.reasoner)
        self._unfinished: dict[str, _Unfinished] = {}
        # finished sequences that still lack log probabilities of their prompt
        self._incomplete: list[Sequence] = []
        on_gpu = resolve_device(config.device).type == "cuda"
        self._stepper = Stepper(
            self._scheduler,
            self._live_runner,
            self._tokenizer,
            overlaps=on_gpu if config.async_scheduling is None else config.async_scheduling,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model and the KV pool, end the ranks, forget all requests. A second call does nothing."""
        if self._live_runner is not None:
            self._live_runner.close()
            self._stepper.close()
            self._adapters.close()
            self._live_runner = None
            give_back_memory()
        self._sequences.grammars.close()
        self._unfinished.clear()

    def _read_pictures(self, reader: PictureReader) -> None:
        """Let requests have pictures, if the model computes the same with them as transformers' own code."""
        assert isinstance(self._live_runner, ModelRunner)
        reader.learn_frame(self._tokenizer)
        try:
            self._picture_queue = PictureQueue(self._live_runner.read_pictures(reader))
            logger.info("the model reads pictures, each in the place of %r", reader.mark)
        except UnsupportedModel as error:
            self._reader = None
            logger.warning(
                "the model is served for text alone: %s; model_path='native' may be faster", error
            )

    @property
    def model_name(self) -> str:
        """The model as the configuration names it."""
        return self.config.model

    @cached_property
    def identity(self) -> ModelIdentity:
        """The model's fingerprint and the dtype it computes in; reads samples of the weights."""
        identity = model_identity(self.config)
        tokens = tuple(sorted(self._tokenizer.control_tokens))
        return replace(
            identity,
            control_tokens=tokens,
            reads_pictures=self.reads_pictures,
            generates=self.generates,
        )

    @property
    def attention_backend(self) -> str:
        """The attention backend that was chosen. Raises EngineClosed."""
        return self._open_runner().backend_name

    @property
    def max_model_len(self) -> int:
        """The most tokens that a sequence may have, prompt and completion together."""
        return self._scheduler.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """The most sequences that run at once."""
        return self._scheduler.max_num_seqs

    @property
    def reads_pictures(self) -> bool:
        """Whether prompts and chats may hold pictures."""
        return self._reader is not None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._unfinished)

    def prepare(self, prompt: Prompt, params: RequestParams = UNCUT) -> PreparedPrompt:
        """Tokenize and check a prompt: the part of `add` that takes longer for a longer prompt.

        Any thread may call this. params: those that `add` will get. Raises what `add` raises for the prompt.
        """
        kind = self._kinds[type(params)]
        root = self._adapters.root(self._adapters.find(params.adapter))
        pictures = pictures_in(prompt)
        if pictures:
            reader = self._reader_for(kind, params)
            text = reader.text_of(list(prompt))
            token_ids, prompt_pictures = reader.read(text, pictures, self._tokenizer.encode)
            return self._with_pictures(kind.prepare(token_ids, params), prompt_pictures)
        prepared = kind.prepare(prompt, params)
        if self._reader is not None and kind.reads_pictures:
            self._reader.check_ids(prepared.token_ids)
        if root == ROOT:  # no adapter: the block keys are right already
            return prepared
        block_keys = self._scheduler.blocks.keys_of(prepared.token_ids, root)
        return replace(prepared, block_keys=block_keys, root=root)

    def prepare_chat(
        self, messages: list[dict[str, Any]], params: RequestParams = UNCUT, **options: Any
    ) -> PreparedPrompt:
        """Prepare a conversation, with any pictures in it: parts {"type": "image", "image": array}.

        Any thread may call this. params: those that `add` will get. options: as `chat_token_ids` takes them.
        Raises UnsupportedTask for a picture if the model reads none.
        """
        pictures = pictures_of(messages)
        if pictures:
            kind = self._kinds[type(params)]
            reader = self._reader_for(kind, params)
            text = self._tokenizer.chat_text(messages, kinds=WITH_PICTURES, **options)
            token_ids, prompt_pictures = reader.read(text, pictures, self._tokenizer.encode_alone)
            return self._with_pictures(kind.prepare(token_ids, params), prompt_pictures)
        token_ids = self.chat_token_ids(
            messages, truncate_prompt_tokens=params.truncate_prompt_tokens, **options
        )
        return self.prepare(token_ids, params)

    def prepare_grammar(self, params: RequestParams) -> Future[Any] | None:
        """Start compiling the grammar that params ask for; return None if they ask for none.

        Any thread may call this. Equal grammars are compiled once. Keep the future: once it is done, `add` need not
        wait for the grammar.
        """
        return self._kinds[type(params)].prepare_grammar(params)

    def add(
        self,
        request_id: str,
        prompt: Prompt | PreparedPrompt,
        params: RequestParams,
        *,
        lane: int = 0,
        continued: Collection[int] = (),
        resumed: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> None:
        """Queue one request: text or token ids, prepared or not. `step()` returns its params.n completions.

        ScoringParams give one completion with the `loglikelihoods` of continuations, PoolingParams one with the
        prompt's `embedding`, ClassParams one with its `class_scores`.
        lane: 0 is the most urgent. A request of lane 0 is in the next step: if there is no room, the latest
        requests of later lanes are preempted. A waiting lane gets at least one admission in twenty.
        continued: token ids of an unfinished completion of this prompt. Up to params.max_tokens more follow, the same
        as if all had been asked for at once.
        resumed: by sample index, the tokens behind `continued` that another engine had generated. The samples go on
        as they would have there; a sample that is complete ends at once. All samples begin anew if the tokens of one
        cannot be its own.
        Raises InvalidRequest or a subclass, having changed nothing: InvalidPrompt, PromptTooLong,
        InvalidSampling, DuplicateRequest, UnsupportedTask, UnknownAdapter, AdapterRefused. An adapter that turns out
        not to fit the model ends the request with finish_reason "error".
        """
        self._open_runner()
        _check_new(request_id, lane, self._unfinished)
        kind = self._kinds[type(params)]
        kind.check(params)
        adapter = self._adapters.find(params.adapter)
        prepared = self._prepared(kind, prompt, params, self._adapters.root(adapter))
        request = NewRequest(request_id, prepared, params, lane, continued, resumed)
        seqs = kind.sequences(request)
        for seq in seqs:
            seq.root = prepared.root
        if adapter is not None:
            self._adapters.add(adapter, seqs)
        else:
            for seq in seqs:
                self._queue(seq)
        self._unfinished[request_id] = _Unfinished(kind, seqs)

    def _prepared(
        self,
        kind: RequestKind[Any],
        prompt: Prompt | PreparedPrompt,
        params: RequestParams,
        root: int,
    ) -> PreparedPrompt:
        """Prepare a prompt, unless it is prepared for these parameters already. Raises what `add` raises.

        root: the number that stands for the request's adapter.
        """
        if not isinstance(prompt, PreparedPrompt):
            return self.prepare(prompt, params)
        if prompt.root == root and kind.is_prepared(prompt, params):
            return prompt
        if prompt.pictures is not None:
            raise InvalidPrompt(
                "a prompt with pictures is neither cut nor scored once it is prepared"
            )
        return self.prepare(prompt.token_ids, params)

    def _queue(self, seq: Sequence) -> None:
        """Hand a new sequence to whatever comes next for it: its end, its pictures, its parent or the scheduler."""
        if seq.finish_reason is not None:
            self._stepper.finish(seq)
        elif seq.status is SequenceStatus.HELD:
            pass  # its parent queues it
        elif self._picture_queue is not None and seq.pictures is not None:
            self._picture_queue.add(seq)
        else:
            self._scheduler.add(seq)

    def abort(self, request_id: str) -> None:
        """Drop all unfinished samples of a request; an unknown or finished id is left alone."""
        unfinished = self._unfinished.pop(request_id, None)
        if unfinished is not None:
            for seq in unfinished.seqs:
                self._scheduler.abort(seq)

    def step(self, *, launches: bool = True) -> list[Completion]:
        """Compute one batch; return the samples that finished in it, [] if there is nothing to do.

        With async_scheduling this launches one batch, and returns what finished in the batch before, which ran
        meanwhile; the first step returns []. launches: False launches nothing and waits for the batch that runs.
        If a step raises because of one request, that request ends with finish_reason "error" and the others go on.
        Raises StepFailed if no request is to blame: nothing is lost, the next step repeats it.
        With tensor parallelism any error of a rank ends all ranks: this call and later ones raise RankFailed.
        """
        self._open_runner()
        if not self._unfinished and not self._stepper.in_flight:
            return []
        self._scheduler.first_scheduled = []
        if launches:
            # sequences whose adapter is loaded now, or could not be loaded
            for seq in self._adapters.look():
                self._queue(seq)
        if self._picture_queue is not None and launches:
            # sequences whose pictures have been computed, or have failed
            for seq in self._picture_queue.look():
                if seq.error is not None:
                    self._stepper.finish(seq)
                else:
                    self._scheduler.add(seq)

        finished = self._incomplete + self._stepper.take(launches)
        self._incomplete = []
        completions: list[Completion] = []
        for seq in finished:
            completion = self._finish(seq)
            if completion is not None:
                completions.append(completion)
        return completions

    @property
    def started(self) -> list[str]:
        """The ids of the requests that the last step scheduled for the first time, once for each sample."""
        return self._scheduler.first_scheduled

    def stats(self) -> EngineStats:
        """Return the counters since the start, and the current state."""
        stats = self._stepper.engine_stats()
        return replace(stats, num_waiting=stats.num_waiting + self._num_held)

    @property
    def _num_held(self) -> int:
        """The number of requests that wait for pictures or adapters, before they wait for the scheduler."""
        return len(self._picture_queue or ()) + len(self._adapters)

    def progress(self) -> dict[str, RequestProgress]:
        """Return how far each running request is. Costs about a microsecond a request."""
        return request_progress(self._scheduler.running)

    def samples_so_far(self) -> dict[str, dict[int, list[int]]]:
        """Return the tokens of each unfinished sample so far, `continued` ones included, by request id and index."""
        return {
            request_id: {seq.index: seq.generated_token_ids for seq in unfinished.seqs}
            for request_id, unfinished in self._unfinished.items()
            if unfinished.kind.generates
        }

    def texts_so_far(self, request_ids: Iterable[str]) -> dict[str, dict[int, PartialText]]:
        """Return what the texts of unfinished samples begin with, by request id and sample index.

        Each text is a beginning of the completion's text. It leaves out an end that later tokens may change: part of a
        character, of a stop string, or of a tag that opens or closes reasoning. Unknown ids are left out.
        """
        texts: dict[str, dict[int, PartialText]] = {}
        for request_id in request_ids:
            unfinished = self._unfinished.get(request_id)
            if unfinished is not None and unfinished.kind.generates:
                texts[request_id] = {
                    seq.index: self._partial_texts.of(seq, unfinished.growing_texts)
                    for seq in unfinished.seqs
                }
        return texts

    def chat_token_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        truncate_prompt_tokens: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of a conversation by the model's chat template.

        Any thread may call this. truncate_prompt_tokens: see SamplingParams.
        options: `tools`, `chat_template_kwargs`, and `now`, the Unix seconds that the template takes for the present.
        Raises PromptTooLong, and InvalidPrompt if the tokenizer has no template or the template refuses the messages.
        """
        limit = self.max_model_len - 1 if truncate_prompt_tokens is None else None
        token_ids = self._tokenizer.chat_token_ids(messages, limit=limit, **options)
        return self._prompts.truncated(token_ids, truncate_prompt_tokens)

    def generate(
        self,
        prompts: Iterable[Prompt],
        params: RequestParams | Iterable[RequestParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Complete all prompts; return their completions in input order, the n samples of each together.

        prompts is read bit by bit, as the engine has room. params: one for all (default SamplingParams()) or one each.
        A refused request gives one completion with finish_reason "error". Raises EngineBusy if other requests are
        unfinished, InvalidRequest if prompts and params differ in number. If it raises, its requests are aborted.
        """
        total = len(prompts) if isinstance(prompts, (list, tuple)) else None
        done = self._run(numbered(prompts, params), total, use_tqdm=use_tqdm)
        completions: list[Completion] = []
        for i in range(len(done)):  # `numbered` gives the requests the ids "0", "1", "2", ...
            completions.extend(sorted(done[str(i)], key=lambda completion: completion.index))
        return completions

    def loglikelihood(
        self, pairs: Iterable[tuple[Prompt, Prompt]], *, use_tqdm: bool = False
    ) -> list[LogLikelihood]:
        """Score each continuation behind its context, by prefill alone; common prefixes are computed once.

        A pair is two texts, split into tokens as lm-evaluation-harness does it, or two lists of token ids. An empty
        context stands for the token that begins a text, or else the one that ends it. An empty continuation is
        certain: its log-likelihood is 0.
        Raises InvalidRequest or a subclass before any pair is scored, ScoringFailed, and EngineBusy.
        """
        scores = Scores(pairs, self._prompts, self.prepare)
        requests = list(scores.requests())
        return scores.results(self._run(iter(requests), len(requests), use_tqdm=use_tqdm))

    def embed(
        self,
        prompts: Iterable[Prompt],
        params: PoolingParams | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[Completion]:
        """Embed all prompts by prefill alone; return their completions, which have an `embedding`, in order.

        Texts are read as sentence-transformers reads them: behind the checkpoint's default prompt, and cut to
        its max_seq_length. Raises what `generate` does, UnsupportedTask if the checkpoint embeds no texts, and
        InvalidSampling if it cannot embed with these params.
        """
        if params is None:
            params = PoolingParams()
        self._kinds[type(params)].check(params)
        return self.generate(prompts, params, use_tqdm=use_tqdm)

    def _run(
        self, requests: Iterator[Request], total: int | None, *, use_tqdm: bool
    ) -> dict[str, list[Completion]]:
        """Complete all requests; return the completions by request id. If it raises, the rest are aborted."""
        self._open_runner()
        if self._unfinished:
            raise EngineBusy(
                f"{len(self._unfinished)} requests are unfinished; step() until they are, or abort them"
            )
        done: dict[str, list[Completion]] = {}
        num_tokens = 0
        try:
            with tqdm(total=total, unit="prompt", dynamic_ncols=True, disable=not use_tqdm) as bar:
                exhausted = False
                while not exhausted or self._unfinished:
                    refused: list[Completion] = []
                    exhausted = exhausted or self._fill(requests, refused)
                    ended = set()
                    for completion in refused + self.step():
                        request_id = completion.request_id
                        done.setdefault(request_id, []).append(completion)
                        num_tokens += len(completion.token_ids)
                        if request_id not in self._unfinished:
                            # several of its samples may end in one step, and it counts once
                            ended.add(request_id)
                    if ended:
                        seconds = bar.format_dict["elapsed"] or 1.0
                        bar.set_postfix_str(f"{num_tokens / seconds:.0f} tok/s", refresh=False)
                        bar.update(len(ended))
        finally:
            for request_id in list(self._unfinished):
                self.abort(request_id)
        return done

    def _reader_for(self, kind: RequestKind[Any], params: RequestParams) -> PictureReader:
        """Return the picture reader. Raises UnsupportedTask or InvalidPrompt if such a request cannot have pictures."""
        if self._reader is None:
            raise UnsupportedTask("this model reads no pictures: it is served for text alone")
        if not kind.reads_pictures:
            raise UnsupportedTask(
                "prompts with pictures are not embedded or classified by a head: that is not built"
            )
        if params.truncate_prompt_tokens is not None:
            raise InvalidPrompt(
                "truncate_prompt_tokens: prompts with pictures are not cut; leave it out"
            )
        return self._reader

    def _with_pictures(self, prompt: PreparedPrompt, pictures: PromptPictures) -> PreparedPrompt:
        """Add pictures to a prompt that was prepared from their placeholders.

        The keys of its KV blocks then depend on the pictures, so that other pictures' prompts do not share the blocks.
        """
        block_keys = self._scheduler.blocks.keys_of(pictures.key_ids)
        return replace(prompt, block_keys=block_keys, pictures=pictures)

    def _open_runner(self) -> Runner:
        if self._live_runner is None:
            raise EngineClosed("this engine is closed; make a new one")
        return self._live_runner

    def _fill(self, requests: Iterator[Request], refused: list[Completion]) -> bool:
        """Add requests until a full batch waits; return whether all have been added.

        refused: a list that gets the completions of requests that `add` refuses.
        """
        while self._scheduler.num_waiting + self._num_held < self.max_num_seqs:
            request = next(requests, None)
            if request is None:
                return True
            try:
                self.add(*request)
            except InvalidRequest as error:
                refused.append(Completion.refused(request[0], error))
        return False

    def _finish(self, seq: Sequence) -> Completion | None:
        """Return the completion of a finished sequence.

        None if its request has failed before or was aborted, or while another sequence of the request still computes
        scores that the completion needs.
        """
        unfinished = self._unfinished.get(seq.request_id)
        if unfinished is None or seq not in unfinished.seqs:
            return None
        if not unfinished.kind.is_complete(seq):
            self._incomplete.append(seq)
            return None
        unfinished.seqs.remove(seq)
        if seq.error is not None or not unfinished.seqs:
            self.abort(seq.request_id)  # drops the request and the sequences it still has
        completion = unfinished.kind.completion(seq)
        if completion is not None and isinstance(seq.error, AdapterGone):
            completion = replace(completion, lacks_adapter=True)
        return completion


def _check_new(request_id: object, lane: object, unfinished: Container[str]) -> None:
    """Raise InvalidRequest for an impossible id or lane, DuplicateRequest for an unfinished id."""
    if not isinstance(request_id, str):
        raise InvalidRequest(f"a request id must be a string, got {request_id!r}")
    if request_id in unfinished:
        raise DuplicateRequest(
            f"request {request_id!r} is unfinished; use another id, or abort it first"
        )
    if isinstance(lane, bool) or not isinstance(lane, int) or lane < 0:
        raise InvalidRequest(f"lane must be an integer of 0 or more, got {lane!r}")
