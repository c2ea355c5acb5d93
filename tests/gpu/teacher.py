"""Teacher-forced logits of our step and of Hugging Face's forward."""

import torch

from torch_paged.engine.batch import BatchLimits, BatchRun, PackedPrompts
from torch_paged.generate.registry import find_session
from torch_paged.patches.attention_seams import eager_attention


def our_logits(model, ids, prompt_len, *, captured=True):
    """Prefill `prompt_len` tokens of ids [B, L], then feed the rest; [B, L - prompt_len, V]."""
    core = find_session(model).core
    rows, total = ids.shape
    positions = torch.arange(prompt_len, dtype=torch.int32, device=ids.device)
    prompts = PackedPrompts(
        lengths=(prompt_len,) * rows,
        ids=ids[:, :prompt_len].reshape(-1),
        embeddings=None,
        positions=positions.repeat(rows),
        last_positions=positions[-1:].expand(rows),
    )
    out = []
    with torch.no_grad(), BatchRun(core, prompts, BatchLimits(total), lag=0) as run:
        out.append(run.prefill().float().clone())
        for at in range(prompt_len, total - 1):
            run.commit(ids[:, at].contiguous())
            out.append(run.next_logits(captured=captured).float().clone())
    return torch.stack(out, dim=1)


def hf_logits(model, ids, prompt_len):
    """The same positions from one forward of the model itself, eager attention."""
    with torch.no_grad(), eager_attention(model):
        rows = [model(row[None], use_cache=False).logits[0, prompt_len - 1 : -1] for row in ids]
    return torch.stack(rows).float()
