"""Ranking: how well each document answers a query."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Self

from jobs.context import JobContext
from jobs.context.served_model import ServedModel
from jobs.context.values import checked_list, truth, whole_number
from jobs.errors import check_limit
from jobs.prompts.arguments import MAX_PROMPTS, Unusable, checked_text, parse_model, text_problem
from jobs.prompts.messages import ChatOptions
from jobs.prompts.prompt_task import PromptTask
from jobs.prompts.responses import Answers, usage
from jobs.prompts.scoring.kind import Scored, Scoring, unscored
from jobs.prompts.scoring.labels import Labels
from jobs.tasks import Completion, LateTask, Request, Task

#: The prompt around a query and a document, from Qwen3-Reranker's model card.
RERANK_PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
RERANK_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

NO_RELEVANCE = "its labels have no finite log-likelihood"
#: The most bytes of all prompts of a reranking together, without the documents. Query and instruction stand before each
#: document.
MAX_RERANK_BYTES = 1 << 26

_YES_OR_NO = Labels.of(["yes", "no"])


@dataclass(frozen=True)
class Relevance(Scoring):
    """Asks a cross-encoder for its score, and any other model for the probability of "yes".

    has_head: whether the model is a cross-encoder. instruction: describes the task in the prompt of other models.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    has_head: bool = False
    instruction: str = RERANK_INSTRUCTION

    columns: ClassVar = {"score": "float64"}
    run_sampling_names = ()
    asks_pairs = True

    @classmethod
    def of_run(cls, options: Mapping[str, Any], model: ServedModel) -> Self:
        """Return the scoring of a run."""
        return cls(has_head=bool(model.classes))

    @classmethod
    def check_served(cls, options: Mapping[str, Any], model: ServedModel) -> None:
        """Raise InvalidJob if the model's head has several classes."""
        model.check_can_rank()

    def request(self, prompt: Any, chat_options: ChatOptions | None = None) -> Request | Unusable:
        """Return the request for a prompt, which is a pair of a query and a document."""
        query, document = prompt
        if self.has_head:  # a cross-encoder reads both texts as one pair
            return Request(
                prompt=query, messages=None, sampling={"pair": document}, kind="classify"
            )
        text = RERANK_PROMPT.format(instruction=self.instruction, query=query, document=document)
        problem = text_problem(text, "the prompt of query and document")
        if problem:
            return Unusable(problem)
        return _YES_OR_NO.request(text)

    def scored(self, completion: Completion) -> Scored:
        """Return the head's score, or the probability of "yes"."""
        if completion.class_scores is not None:
            [score] = completion.class_scores.values()  # a head that ranks has one class
            return Scored({"score": score})
        if completion.loglikelihoods is None:
            return unscored(completion)
        scored = _YES_OR_NO.scored(completion)
        if scored.error is not None:
            return Scored(error=NO_RELEVANCE)
        probability_of = dict(scored.values["probabilities"])  # by label
        return Scored({"score": probability_of["yes"]})


def rerank_task(
    query: object,
    documents: object,
    *,
    instruction: object = None,
    top_n: object = None,
    return_documents: object = True,
    model: object = None,
) -> Task:
    """Return the task of `jobs.rerank`. top_n: the most results that are returned. Raises InvalidJob."""
    model_name = parse_model(model)
    query = checked_text(query, "query")
    if instruction is None:
        instruction = RERANK_INSTRUCTION
    instruction = checked_text(instruction, "instruction")
    texts = _documents(documents)
    _check_size(instruction, query, len(texts))
    num_results = None if top_n is None else whole_number("top_n", top_n)
    shown_documents = texts if truth("return_documents", return_documents) else None

    def task(context: JobContext) -> PromptTask:
        """Return the task, now that the served model is known."""
        context.model.check_can_rank()
        scoring = Relevance(has_head=bool(context.model.classes), instruction=instruction)
        requests = [scoring.request((query, text)) for text in texts]
        respond = partial(
            _response, scoring=scoring, documents=shown_documents, num_results=num_results
        )
        return PromptTask(requests, respond, model_name)

    return LateTask(task)


def _check_size(instruction: str, query: str, num_documents: int) -> None:
    """Raise InvalidJob if the prompts without their documents have more than MAX_RERANK_BYTES together."""
    without_document = RERANK_PROMPT.format(instruction=instruction, query=query, document="")
    num_bytes = len(without_document.encode()) * num_documents
    problem = (
        f"query and instruction stand before each of {num_documents} documents, {{}} bytes in all"
    )
    remedy = "shorten them, or make several jobs of the documents"
    check_limit(num_bytes, MAX_RERANK_BYTES, problem, remedy)


def _documents(documents: object) -> list[str]:
    """Return the texts of documents. Raises InvalidJob."""
    texts = []
    entries = checked_list("documents", documents, "a list of texts", 1, MAX_PROMPTS)
    for number, entry in enumerate(entries):
        has_only_text = isinstance(entry, dict) and entry.keys() == {"text"}
        document = entry["text"] if has_only_text else entry
        texts.append(checked_text(document, f"document {number}"))
    return texts


def _response(
    answers: Answers,
    job_id: str,
    scoring: Relevance,
    documents: list[str] | None,
    num_results: int | None,
) -> dict[str, Any]:
    """Return the job's response, with the most relevant document first.

    documents: the texts of the results; None leaves the texts out. num_results: the most results that are returned;
    None for all.
    """
    results = []
    for number, answer in enumerate(answers):
        scored = scoring.scored(answer.first)
        result = {"index": number, "relevance_score": scored.values.get("score")}
        if documents is not None:
            result["document"] = {"text": documents[number]}
        if scored.error is not None:
            result["error"] = scored.error
        results.append(result)
    results.sort(key=_rank)
    return {"object": "rerank", "results": results[:num_results], "usage": usage(answers)}


def _rank(result: Mapping[str, Any]) -> tuple[bool, float]:
    """Return the sort key of a result. The most relevant result comes first, and results without a score come last."""
    score = result["relevance_score"]
    if score is None:
        return True, 0.0
    return False, -score
