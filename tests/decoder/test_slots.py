"""Which modules a plan may bypass: kernels read their parameters, and what others return."""

import pytest
import torch
from torch import nn

from torch_paged.decoder.bind_linear import call_module
from torch_paged.decoder.slots import plain_linear_slot, plain_slot


def _strided(module, name, tensor):
    setattr(module, name, nn.Parameter(tensor))
    return module


@pytest.mark.parametrize(
    ("slot", "module", "name"),
    [
        (plain_slot, _strided(nn.RMSNorm(8), "weight", torch.ones(1).expand(8)), "weight"),
        (plain_slot, _strided(nn.Embedding(9, 8), "weight", torch.ones(8, 9).T), "weight"),
        (plain_linear_slot, _strided(nn.Linear(8, 9), "weight", torch.ones(8, 9).T), "weight"),
        (plain_linear_slot, _strided(nn.Linear(8, 9), "bias", torch.ones(9, 2)[:, 0]), "bias"),
    ],
    ids=["norm", "embedding", "linear", "bias"],
)
def test_a_module_with_a_strided_parameter_is_called(slot, module, name):
    found = slot(module)
    assert found.kind == "opaque"
    assert found.why == f"its {name} is not contiguous"


class _Transposing(nn.Linear):
    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        return (self.weight @ flat.T).T.view(*x.shape[:-1], -1)


@pytest.mark.parametrize("decode", [True, False])
def test_what_a_called_module_returns_becomes_contiguous(decode):
    module, x = _Transposing(8, 9, bias=False), torch.randn(3, 8)
    with torch.no_grad():
        assert not module(x).is_contiguous()
        out = call_module(module, decode)(x)
        assert out.is_contiguous()
        torch.testing.assert_close(out, nn.functional.linear(x, module.weight))
