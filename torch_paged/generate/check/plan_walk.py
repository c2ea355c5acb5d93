"""The fused tier: every value of a plan beside what goes in and out of Hugging Face's modules.

A plan names the modules that it stands for, so nothing has to be said here about any family: what
a norm or a projection reads is what its module is given, and what it writes is what its module
returns. Each op is then given Hugging Face's value instead of ours, so that an error shows where
it is made and nowhere else.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from torch import Tensor, nn

from torch_paged.decoder.inputs import Values
from torch_paged.decoder.plan import Embed, Instruction, Linear, Norm, RotaryTable
from torch_paged.decoder.plan_experts import CallBlock, Experts, Route
from torch_paged.decoder.spec import DecoderSpec, ModuleRef
from torch_paged.decoder.watch import spec_modules
from torch_paged.generate.check.own_calls import OwnCall, OwnForward
from torch_paged.generate.check.points import Point, match, measure

# Value of a plan, without its index -> what it is.
TITLES = {
    "x": "norm before attention",
    "q": "q projection",
    "k": "k projection",
    "v": "v projection",
    "qkv": "q, k and v in one projection",
    "qa": "low-rank q projection",
    "kv": "projection to latent and key",
    "qn": "q norm over the whole width",
    "kn": "k norm over the whole width",
    "a": "attention",
    "o": "projection behind attention",
    "on": "norm behind attention",
    "r": "residual behind attention",
    "y": "norm before the MLP",
    "g": "gate projection",
    "u": "up projection",
    "gu": "gate and up in one projection",
    "m": "activation of the MLP",
    "d": "down projection",
    "w": "weights of the experts",
    "e": "choice of the experts",
    "ex": "experts",
    "gs": "gate projection of the shared expert",
    "us": "up projection of the shared expert",
    "gus": "gate and up of the shared expert in one projection",
    "ms": "activation of the shared expert",
    "ds": "down projection of the shared expert",
    "sg": "gate on the shared expert",
    "s": "gated shared expert",
    "f": "experts with the shared one",
    "dn": "norm behind the MLP",
    "h": "residual behind the MLP",
    "rn": "norm of the sum behind attention",
    "hn": "norm of the sum behind the MLP",
    "qc": "clipped q projection",
    "kc": "clipped k projection",
    "vc": "clipped v projection",
    "qkvc": "clipped q, k and v",
    "wide": "projection of the embedding",
    "placed": "embedding with its position",
    "entry": "norm of the embedding",
    "narrow": "projection in front of the vocabulary",
    "cos": "rotary table (cos)",
    "sin": "rotary table (sin)",
    "last": "residual behind the last layer",
    "final": "final norm",
    "logits": "projection to the vocabulary",
    "logits_out": "logits",
}
_VALUE = re.compile(r"([a-z_]+?)(\d+)?$")


def title_of(value: str) -> tuple[str, int | None]:
    """Return what a value of a plan is, and of which layer."""
    found = _VALUE.match(value)
    assert found is not None, value
    name, number = found.groups()
    if value == "h":
        return "embedding", None
    layer = None if number is None or name in ("cos", "sin") else int(number)
    return TITLES[name], layer


class Place(NamedTuple):
    """A value of the plan and the module that is given it, or returns it."""

    value: str
    ref: ModuleRef
    returned: bool


def read_places(ins: Instruction) -> list[Place]:
    """Return the values that `ins` reads where a module of the model is given the same."""
    if isinstance(ins, Norm) and ins.residual is None:
        return [Place(ins.source, ins.spec.ref, False)]
    if isinstance(ins, Linear):
        if ins.joined is not None:
            return [Place(ins.source, ins.joined.spec.ref, False)]
        refs = [ins.norm.ref] if ins.norm is not None else [part.ref for part in ins.parts]
        return [Place(ins.source, ref, False) for ref in refs]
    if isinstance(ins, Route | Experts):
        return [Place(ins.source, ins.spec.ref, False)]
    if isinstance(ins, CallBlock):
        return [Place(ins.source, ins.ref, False)]
    return []


def written_places(ins: Instruction) -> list[Place]:
    """Return the values that `ins` writes where a module is given, or returns, the same."""
    if isinstance(ins, Embed) and ins.multiplier == 1.0:
        return [Place(ins.target, ins.ref, True)]
    if isinstance(ins, Norm):
        summed = [] if ins.summed is None else [Place(ins.summed, ins.spec.ref, False)]
        target = [] if ins.added is not None else [Place(ins.target, ins.spec.ref, True)]
        return [*summed, *target]
    if isinstance(ins, Linear):
        reader = ins.parts[0].ref if ins.norm is None else ins.norm.ref
        summed = [] if ins.joined is None else [Place(ins.joined.summed, reader, False)]
        if ins.activation is not None or ins.residual is not None:
            return summed
        parts = zip(ins.outputs, ins.parts, strict=True)
        return [*summed, *(Place(target, part.ref, True) for target, part in parts)]
    if isinstance(ins, Experts) and ins.residual is None:
        return [Place(ins.target, ins.spec.ref, True)]
    if isinstance(ins, CallBlock):
        return [Place(ins.target, ins.ref, True)]
    return []


class PlanWalk:
    """Compares the values of a plan as it runs; see `Visitor`.

    Attributes:
        points: all comparisons so far, in order.
        uncompared: titles of values that no module of the model has.
        running: the instruction that is running.
    """

    def __init__(self, limit: float) -> None:
        self.points: list[Point] = []
        self.uncompared: dict[str, None] = {}
        self.running: Instruction | None = None
        self._limit = limit

    def begin(self, forward: OwnForward) -> None:
        """Compare with this forward from now on."""
        self._forward = forward
        self._makers: dict[str, Instruction] = {}
        self._given: dict[str, Tensor] = {}
        self._seen: Counter[tuple[int, bool]] = Counter()

    def end(self, logits: Tensor) -> None:
        """Compare what the plan returned; logits [vocab_size]."""
        result = list(self._makers.values())[-1].targets[0]
        ours = logits[None]
        self._note("logits_out", "what the model returns", ours, match(self._forward.logits, ours))
        missing = self._makers.keys() - self._given.keys() - {result}
        self.uncompared |= dict.fromkeys(title_of(value)[0] for value in sorted(missing))

    def before(self, ins: Instruction, values: Values) -> None:
        self.running = ins
        for place in read_places(ins):
            self._compare(place, values)
            if place.value == "last" and place.value in self._given:
                # The part of this value that is read has been compared.
                maker = self._makers["last"]
                self._given |= {source: self._given["last"] for source in maker.sources}

    def after(self, ins: Instruction, values: Values) -> None:
        self._makers |= dict.fromkeys(ins.targets, ins)
        before = len(self.points)
        for place in written_places(ins):
            # What is made of a sum that is wrong already says nothing about the making.
            summed = isinstance(ins, Norm) or (isinstance(ins, Linear) and ins.joined is not None)
            wrong = summed and any(p.parts for p in self.points[before:])
            self._compare(place, values, noted=not wrong)
        if isinstance(ins, RotaryTable):
            self._compare_tables(ins, values)

    def _compare(self, place: Place, values: Values, *, noted: bool = True) -> None:
        """Note the difference at a place, and put Hugging Face's value there."""
        call = self._call(place.ref, place.returned)
        if call is None:
            return
        theirs = next(iter(call.outputs), None) if place.returned else call.input
        if theirs is None:
            return
        ours, given = values[place.value], self._given.get(place.value)
        matched = match(theirs, ours)
        if given is not None and matched is not None and given.equal(matched):
            return
        if noted:
            what = f"the {'output' if place.returned else 'input'} of {place.ref.name}"
            self._note(place.value, what, ours, matched)
        if matched is not None:
            self._given[place.value] = matched
            values[place.value] = matched.to(ours.dtype, copy=True).contiguous()

    def _compare_tables(self, ins: RotaryTable, values: Values) -> None:
        """Compare the angles; ours hold each once, and stay as they are: rounded by no dtype."""
        kind = ins.spec.buffer.removesuffix("inv_freq").removesuffix("original_").strip("_")
        call = self._call(ins.spec.ref, True, kind)
        if call is None or len(call.outputs) < len(ins.targets):
            return
        for value, theirs in zip(ins.targets, call.outputs, strict=False):
            ours, width = values[value], values[value].shape[-1]
            forms = (theirs, theirs[..., :width], theirs[..., ::2])
            fitting = [form for form in (match(form, ours) for form in forms) if form is not None]
            if fitting:
                best = min(fitting, key=lambda form: measure(ours, form)[1])
                self._note(value, f"the output of {ins.spec.ref.name}", ours, best)
                self._given[value] = best

    def _call(self, ref: ModuleRef, returned: bool, name: str = "") -> OwnCall | None:
        """Return the module's next call in this forward, or the first that names `name`."""
        calls = self._forward.calls.get(id(ref.module), [])
        if name:
            return next((call for call in calls if name in call.names), None)
        key = (id(ref.module), returned)
        index = self._seen[key]
        self._seen[key] += 1
        return calls[index] if index < len(calls) else None

    def _note(self, value: str, place: str, ours: Tensor, theirs: Tensor | None) -> None:
        title, layer = title_of(value)
        maker = self._makers.get(value) or list(self._makers.values())[-1]
        error = measure(ours, theirs)
        self.points.append(
            Point(self._forward.phase, title, layer, place, str(maker), *error, self._limit)
        )


def modules_of(spec: DecoderSpec) -> list[nn.Module]:
    """Return the modules whose calls a plan of `spec` is compared with."""
    return [ref.module for ref in spec_modules(spec)]


__all__ = ["TITLES", "PlanWalk", "modules_of", "title_of"]
