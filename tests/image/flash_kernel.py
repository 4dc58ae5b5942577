"""FlashAttention's operators of torch on a CPU, by the formula: what they accept and return is as on a GPU.

So torch's own ``varlen_attn``, its custom operator and its backward pass run without a GPU.
"""

from contextlib import contextmanager

import torch


@contextmanager
def installed():
    """Register both operators for the duration of the context."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


def forward(query, key, value, starts, key_starts, longest, key_longest, dropout, causal, debug, **options):
    """Output, the logarithm of the sum of exponentials (heads, total), and what the formula does not need."""
    assert (dropout, debug, options.get("seqused_k"), options.get("block_table")) == (0.0, False, None, None)
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    assert starts.dtype == torch.int32
    assert torch.equal(starts, key_starts)
    assert longest == key_longest == int(starts.diff().max())
    outputs, sums = [], []
    for _, _, v, scores, _ in sequences(query, key, value, starts, causal, options):
        outputs.append((scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1))
        sums.append(scores.logsumexp(-1))
    empty = query.new_empty(0)
    return torch.cat(outputs), torch.cat(sums, 1), query.new_zeros(2, dtype=torch.uint64), empty, empty


def backward(gradient, query, key, value, output, sums, starts, *arguments, **options):
    """The gradients of query, key and value; an operator is called below autograd, so by their formulas."""
    causal = arguments[4]  # after the starts of keys, both lengths and the dropout
    found = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for q, k, v, scores, at in sequences(query, key, value, starts, causal, options):
        weights = (scores - sums[:, at].unsqueeze(-1)).exp()  # as the kernel does: from the sums of forward
        upper = gradient[at].transpose(0, 1).float()
        inner = upper @ v.float().transpose(1, 2) - (upper * output[at].transpose(0, 1)).sum(-1, keepdim=True)
        inner = weights * inner * options["scale"]
        parts = (inner @ k.float(), inner.transpose(1, 2) @ q.float(), weights.transpose(1, 2) @ upper)
        for tensor, part in zip(found, parts, strict=True):
            grouped = part.unflatten(0, (tensor.shape[1], -1)).sum(1)  # heads that share a key and a value
            tensor[at] = grouped.transpose(0, 1).to(tensor.dtype)
    return tuple(found)


def sequences(query, key, value, starts, causal, options):
    """Yield for each sequence query, key and value by heads, their scores, and where it is.

    Query i sees key j where i - left <= j <= i + right, and -1 is no limit.
    """
    left, right = options["window_size_left"], 0 if causal else options["window_size_right"]
    groups = query.shape[1] // key.shape[1]
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        at = slice(begin, end)
        q, k, v = (each[at].transpose(0, 1) for each in (query, key, value))
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        ahead = torch.arange(end - begin) - torch.arange(end - begin).unsqueeze(1)
        hidden = ((ahead > right) & (right >= 0)) | ((-ahead > left) & (left >= 0))
        scores = (q @ k.transpose(1, 2) * options["scale"]).float()
        yield q, k, v, scores.masked_fill(hidden, float("-inf")), at
