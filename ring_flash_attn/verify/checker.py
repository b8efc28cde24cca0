"""Checking cases on the ranks: virtual ones, new processes, or those of torchrun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

import torch

from ..bench.versus import refuse_kernels
from ..comm import launch
from ..kernels.base import AUTO, Call, choose_kernel
from ..plan.tiles import Mask
from .answers import Inputs, answer, make_inputs, torch_dtype
from .callers import Tensors, call_on_rank, call_virtual, part, tokens
from .cases import Case, Choice
from .differences import Differences
from .measure import Error, compare
from .questions import Question

MOST_ERRORS = 3  # after so many crashes the rest is left out


class Status(Enum):
    """What became of a case."""

    PASS = "pass"
    FAIL = "fail"
    CANNOT = "cannot"  # the kernel that was asked for does not do this
    ERROR = "error"  # it raised, died or hung
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one process found out about a case: errors of its ranks, or why there are none."""

    kernel: str
    errors: tuple[Error, ...] = ()
    reason: str = ""
    differences: Mapping[str, tuple[Error, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a case, over all ranks.

    Attributes:
        case: which.
        status: in a word.
        kernel: that was used.
        errors: against the oracle.
        reason: why there are none.
        differences: from one device, and from another kernel, by its name; only for the report.
    """

    case: Case
    status: Status
    kernel: str = ""
    errors: tuple[Error, ...] = ()
    reason: str = ""
    differences: Mapping[str, tuple[Error, ...]] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        """Whether it makes the run fail."""
        return self.status in (Status.FAIL, Status.ERROR, Status.LEFT_OUT)


def check_all(
    cases: Sequence[Case], choice: Choice, backend: str, timeout: float
) -> Iterator[Result]:
    """Results in the order of the cases, each as soon as all ranks have it."""
    if choice.virtual:
        with _one_thread():
            yield from map(_result, cases, _virtually(cases, choice))
    elif launch.torchrun_rank():
        body = launch.run_joined(check_on_rank, (cases, choice), choice.device, backend)
        yield from map(_result, cases, body)
    else:
        yield from _spawned(cases, choice, backend, timeout)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small products are faster on one thread than on threads that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _spawned(
    cases: Sequence[Case], choice: Choice, backend: str, timeout: float
) -> Iterator[Result]:
    """In new processes; after a crash in yet newer ones, from the next case on."""
    done = crashes = 0
    while done < len(cases) and crashes < MOST_ERRORS:
        args = (cases[done:], choice)
        try:
            for outcomes in launch.run_spawned(
                check_on_rank, args, choice.world_size, choice.device, backend, timeout
            ):
                yield _result(cases[done], outcomes)
                done += 1
        except launch.RanksFailed as failure:
            if done < len(cases):
                yield Result(cases[done], Status.ERROR, reason=str(failure))
            done, crashes = done + 1, crashes + 1
    for case in cases[done:]:
        yield Result(case, Status.LEFT_OUT, reason=f"not run after {crashes} crashes")


def check_on_rank(
    rank: int, world_size: int, cases: Sequence[Case], choice: Choice
) -> Iterator[Outcome]:
    """What a rank finds out about each case."""
    device = launch.rank_device(choice.device, rank)
    differences = Differences(choice, device)
    for case in cases:
        inputs = make_inputs(case.question, device)
        try:
            kernel = _kernel(case, device)
            # The draw of the group's first rank counts; a function without a group has its own.
            torch.manual_seed(case.question.seed + (rank if case.layout else 0))
            found = call_on_rank(case, inputs, rank, world_size)
        except NotImplementedError as reason:
            yield Outcome(case.kernel, reason=str(reason))
            continue
        errors = _errors(case, found, rank, world_size, device, whole_sink=False)
        others = differences.of(case, kernel, found, rank, world_size)
        yield Outcome(kernel, errors, differences=others)


def _virtually(cases: Sequence[Case], choice: Choice) -> Iterator[list[Outcome]]:
    device = launch.rank_device(choice.device, 0)
    differences = Differences(choice, device)
    for case in cases:
        inputs = make_inputs(case.question, device)
        try:
            kernel = _kernel(case, device)
            torch.manual_seed(case.question.seed)
            found = _call_here(case, inputs, choice.world_size)
        except NotImplementedError as reason:
            yield [Outcome(case.kernel, reason=str(reason))]
            continue
        yield [
            Outcome(
                kernel,
                _errors(case, own, rank, len(found), device, whole_sink=True),
                differences=differences.of(case, kernel, own, rank, len(found)),
            )
            for rank, own in enumerate(found)
        ]


def _call_here(case: Case, inputs: Inputs, world_size: int) -> list[Tensors]:
    if not case.layout:  # attention on one device needs no group
        return [call_on_rank(case, inputs, 0, 1)]
    return call_virtual(case, inputs, world_size)


def _errors(
    case: Case,
    found: Tensors,
    rank: int,
    world_size: int,
    device: torch.device,
    whole_sink: bool,
) -> tuple[Error, ...]:
    """Errors of one rank's tensors. A rank's dsink is its own queries' part, unless it is whole."""
    right = answer(case.question, device)
    errors = []
    for name, got in found.items():
        judged = [right]
        if name != "dsink":
            want = part(case, name, right.tensors[name], rank, world_size)
        elif whole_sink:
            want = right.tensors[name]
        else:
            queries = tuple(tokens(case, "q", rank, world_size))
            judged.append(answer(case.question, device, queries))
            want = judged[-1].tensors[name]
        errors.append(
            compare(
                name,
                rank,
                got,
                want,
                dtype=torch_dtype(case.question.dtype),
                plain=max(each.plain_errors[name] for each in judged),
                largest_value=max(each.largest[name] for each in judged),
                scale=max(each.scales[name] for each in judged),
            )
        )
    return tuple(errors)


def _kernel(case: Case, device: torch.device) -> str:
    """The kernel that the case will get; NotImplementedError with reasons if there is none."""
    question = case.question
    scale = question.softmax_scale or question.headdim**-0.5
    return choose_kernel(case.kernel, _call(question, scale, device)).name


def check_kernels(cases: Sequence[Case], choice: Choice) -> None:
    """NotImplementedError for kernels that can do none of the cases they were asked for."""
    device = launch.rank_device(choice.device, 0)
    refused = {}
    for kernel in dict.fromkeys(case.kernel for case in cases if case.kernel != AUTO):
        own = [case for case in cases if case.kernel == kernel]
        reasons = _why_none(own, device)
        if reasons:
            asked = f"--kernel {kernel}" if kernel in choice.kernels else own[0].function
            refused[asked] = reasons
    refuse_kernels(refused, device)


def _why_none(cases: Sequence[Case], device: torch.device) -> list[str]:
    """Of each case why it cannot be done; nothing if one can."""
    reasons = []
    for case in cases:
        try:
            _kernel(case, device)
        except NotImplementedError as error:
            reasons.append(str(error))
        else:
            return []
    return reasons


def _call(question: Question, scale: float, device: torch.device) -> Call:
    lead = () if question.batch is None else (question.batch,)
    slopes = torch.empty((*lead, question.nheads), device="meta") if question.alibi else None
    return Call(
        device=device,
        dtype=torch_dtype(question.dtype),
        nheads=question.nheads,
        nheads_k=question.nheads_k,
        headdim=question.headdim,
        headdim_v=question.headdim_v,
        softmax_scale=scale,
        mask=Mask.of(question.causal, question.window_size),
        softcap=question.softcap,
        alibi_slopes=slopes,
        dropout_p=question.dropout_p,
        sink=question.sink,
        packed=len(question.lengths_q) > 1,
        with_lse=True,
    )


def _result(case: Case, outcomes: Sequence[Outcome]) -> Result:
    errors = tuple(error for outcome in outcomes for error in outcome.errors)
    reason = next((outcome.reason for outcome in outcomes if outcome.reason), "")
    if reason:
        asked = case.kernel != AUTO
        return Result(case, Status.CANNOT if asked else Status.FAIL, case.kernel, errors, reason)
    status = Status.PASS if all(error.passed for error in errors) else Status.FAIL
    differences = {
        versus: tuple(each for outcome in outcomes for each in outcome.differences.get(versus, ()))
        for versus in outcomes[0].differences
    }
    return Result(case, status, outcomes[0].kernel, errors, differences=differences)
