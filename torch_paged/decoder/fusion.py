"""Peephole rules over plans: each looks at neighbouring instructions and merges them.

A rule may only remove a value that nothing else reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from torch_paged.decoder.linears import HeldLinear, held_linear, linear_slot
from torch_paged.decoder.plan import Activate, Add, Glu, Instruction, Join, Linear, Norm, Plan
from torch_paged.decoder.plan_experts import Experts
from torch_paged.decoder.slots import plain_slot
from torch_paged.decoder.spec import LinearSpec
from torch_paged.ops.fused_linear import MAX_RANK, Folds, tma_serves

# Says of a layer (output features over all parts, input features), and whether its two parts are
# a gate and its up projection, which neighbours one kernel for it pays to take in.
Pays = Callable[[tuple[int, int], bool], Folds]


def always(shape: tuple[int, int], gated: bool) -> Folds:
    """Fold the neighbours into every layer, as at small batch."""
    return "all"


@dataclass(frozen=True, slots=True)
class FusionProfile:
    """Which rules apply: linears take the neighbours that `linears` names, norms take adds always.

    A linear that is served is one kernel for all of its parts, with neighbours or without.

    `linears` None leaves all linears to torch.
    """

    linears: Pays | None
    add_norm: bool = True


Rule = Callable[[Instruction, Instruction, Counter[str]], "Instruction | None"]


def fuse(plan: Plan, profile: FusionProfile) -> Plan:
    """Return `plan` with the rules of `profile` applied until none fits."""
    rules: list[Rule] = []
    pays = profile.linears
    if pays is not None:
        folds = (_norm_linear, _linear_glu, _linear_activation, _linear_residual)
        rules += [partial(fold, pays=pays) for fold in folds]
        rules += [_experts_residual]
    if profile.add_norm:
        rules += [_add_norm, _norm_add]
    if profile.add_norm and pays is not None:
        rules += [partial(_join_linear, pays=pays)]
    instructions = list(plan.instructions)
    for rule in rules:
        instructions = _apply(rule, instructions, plan.result)
    if pays is not None:
        instructions = [_one_kernel(ins, pays) for ins in instructions]
    return Plan(plan.mode, tuple(instructions))


def _apply(rule: Rule, instructions: list[Instruction], result: str) -> list[Instruction]:
    uses = Counter(source for i in instructions for source in i.sources)
    uses[result] += 1
    out: list[Instruction] = []
    for instruction in instructions:
        merged = rule(out[-1], instruction, uses) if out else None
        if merged is None:
            out.append(instruction)
        else:
            out[-1] = merged
    return out


def _has_halves(part: LinearSpec) -> bool:
    """Say whether a linear can be read as two, of half its output features each."""
    module = part.ref.module
    if linear_slot(module).kind != "fused" or held_linear(module).updates:
        return False
    return held_linear(module).weight.shape[0] % 2 == 0


def _folds(linear: Linear, pays: Pays, gated: bool = False) -> Folds:
    modules = [part.ref.module for part in linear.parts]
    if len(modules) > 3 or any(linear_slot(module).kind != "fused" for module in modules):
        return "none"
    held = [held_linear(module) for module in modules]
    if len({linear.base.weight.dtype for linear in held}) != 1 or not _fit_kernel(held):
        return "none"
    weights = [linear.base.weight for linear in held]
    shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
    # Two projections alike of one source are a gate and its up projection in every family.
    alike = len(modules) == 2 and len({w.shape for w in weights}) == 1
    folds = pays(shape, gated or linear.gated or alike)
    return "none" if folds == "epilogue" and not tma_serves(weights) else folds


def _one_kernel(instruction: Instruction, pays: Pays) -> Instruction:
    """Make a linear that a kernel serves one call of it, without neighbours too."""
    if isinstance(instruction, Linear) and _folds(instruction, pays) != "none":
        return replace(instruction, one_kernel=True)
    return instruction


def _fit_kernel(linears: list[HeldLinear]) -> bool:
    """Say whether one kernel can add the updates: one adapter each, in one dtype."""
    if any(len(linear.updates) > 1 for linear in linears):
        return False
    updates = [linear.updates[0] for linear in linears if linear.updates]
    if any(u.rank > MAX_RANK or not u.up.weight.is_contiguous() for u in updates):
        return False
    dtypes = {update.dtype for update in updates}
    return not dtypes or dtypes in ({linears[0].base.weight.dtype}, {torch.float32})


def _norm_linear(
    first: Instruction, second: Instruction, uses: Counter[str], pays: Pays
) -> Instruction | None:
    if not isinstance(first, Norm) or not isinstance(second, Linear):
        return None
    if first.residual is not None or second.source != first.target or uses[first.target] != 1:
        return None
    if first.spec.kind != "rms" or plain_slot(first.spec.ref.module).kind != "fused":
        return None
    if _folds(second, pays) != "all" or not _same_dtype(first, second):
        return None
    return replace(second, source=first.source, norm=first.spec)


def _same_dtype(norm: Norm, linear: Linear) -> bool:
    """Say whether what the norm returns has the linear's dtype; a gain may be wider inside."""
    gain = getattr(norm.spec.ref.module, "weight", None)
    if gain is None or not norm.spec.cast_before_gain:
        return True
    return gain.dtype == linear.parts[0].ref.module.weight.dtype


def _linear_glu(
    first: Instruction, second: Instruction, uses: Counter[str], pays: Pays
) -> Instruction | None:
    if not isinstance(first, Linear) or not isinstance(second, Glu):
        return None
    if second.projections != first.targets or any(uses[target] != 1 for target in first.targets):
        return None
    if len(first.parts) == 1 and not _has_halves(first.parts[0]):
        return None
    if len(first.parts) > 2 or _folds(first, pays, gated=True) == "none":
        return None
    return replace(first, targets=(second.target,), activation=second.activation, gated=True)


def _linear_activation(
    first: Instruction, second: Instruction, uses: Counter[str], pays: Pays
) -> Instruction | None:
    if not isinstance(first, Linear) or not isinstance(second, Activate):
        return None
    if len(first.parts) != 1 or first.targets != (second.source,) or _folds(first, pays) == "none":
        return None
    if first.activation is not None or uses[second.source] != 1:
        return None
    return replace(first, targets=(second.target,), activation=second.activation)


def _linear_residual(
    first: Instruction, second: Instruction, uses: Counter[str], pays: Pays
) -> Instruction | None:
    if not isinstance(first, Linear) or not isinstance(second, Add):
        return None
    if len(first.parts) != 1 or first.targets != (second.right,) or _folds(first, pays) == "none":
        return None
    if first.activation is not None or second.multiplier != 1.0 or uses[second.right] != 1:
        return None
    return replace(first, targets=(second.target,), residual=second.left)


def _experts_residual(
    first: Instruction, second: Instruction, uses: Counter[str]
) -> Instruction | None:
    if not isinstance(first, Experts) or not isinstance(second, Add):
        return None
    if second.right != first.target or first.residual is not None or uses[second.right] != 1:
        return None
    if second.multiplier != 1.0:
        return None
    return replace(first, target=second.target, residual=second.left)


def _norm_add(first: Instruction, second: Instruction, uses: Counter[str]) -> Instruction | None:
    if not isinstance(first, Norm) or not isinstance(second, Add):
        return None
    if second.right != first.target or first.residual is not None or uses[first.target] != 1:
        return None
    if first.spec.kind != "rms" or plain_slot(first.spec.ref.module).kind != "fused":
        return None
    if second.multiplier != 1.0 or second.left == first.target:
        return None
    return replace(first, target=second.target, added=second.left)


def _join_linear(
    first: Instruction, second: Instruction, uses: Counter[str], pays: Pays
) -> Instruction | None:
    """Take what `_norm_add` made into the linear that reads the sum."""
    if not isinstance(first, Norm) or not isinstance(second, Linear) or first.added is None:
        return None
    if second.source != first.target or second.residual is not None:
        return None
    if _folds(second, pays) != "all" or not _same_dtype(first, second):
        return None
    if any(held_linear(part.ref.module).updates for part in second.parts):
        return None
    joined = Join(first.spec, first.added, first.target)
    targets = (*second.targets, first.target)
    return replace(second, source=first.source, targets=targets, joined=joined)


def _add_norm(first: Instruction, second: Instruction, uses: Counter[str]) -> Instruction | None:
    if not isinstance(first, Add) or not isinstance(second, Norm):
        return None
    if second.source != first.target or second.residual is not None or first.multiplier != 1.0:
        return None
    if second.spec.kind != "rms" or plain_slot(second.spec.ref.module).kind != "fused":
        return None
    return replace(second, source=first.right, residual=first.left, summed=first.target)
