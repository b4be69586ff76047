"""What a launcher asks of the tensors that it is given: one clear error, before anything is launched.

Scripts reach these functions as common.operands and so on.
"""
import torch
from torch.autograd import forward_ad

import common


def operands(launcher, dtypes, **tensors):
    """Raise, naming the argument, unless all are dense tensors of one of dtypes, the same for all, on one CUDA device
    (or CPU, if interpreted): TypeError on types and dtypes, ValueError on devices and views that a kernel would
    misread, RuntimeError where a gradient would be lost."""
    (first, one), *_ = tensors.items()
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            raise TypeError(f"{launcher}: {name} is {getattr(x, 'layout', type(x))}; it must be a dense torch.Tensor")
        if x.dtype not in dtypes or x.dtype != one.dtype:
            pair = f"{first} is {one.dtype} and " if x.dtype != one.dtype else ""
            raise TypeError(f"{launcher}: {pair}{name} is {x.dtype}; all must have one dtype of "
                            + ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes))
        if common.INTERPRETED and x.dtype == torch.bfloat16:
            raise TypeError(f"{launcher}: {name} is bfloat16, which Triton's interpreter computes wrong")
        if not x.is_cuda and not (common.INTERPRETED and x.is_cpu):
            raise ValueError(f"{launcher}: {name} is on {x.device}; it must be on a CUDA device")
        if x.device != one.device:
            raise ValueError(f"{launcher}: {first} is on {one.device} and {name} on {x.device}; they must be "
                             "on one device")
        dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None
        if dual or x.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(f"{launcher}: {name} {'has a tangent' if dual else 'requires grad'}, and "
                               f"{launcher} is forward only: pass "
                               f"{name}.detach()" + ("" if dual else ", or call it under torch.no_grad()"))
        if x.is_neg():  # as .imag of a .conj(): the sign is not in memory
            raise ValueError(f"{launcher}: {name} is a negated view; pass {name}.resolve_neg()")


def writable(launcher, out, shape):
    """Raise ValueError unless out has this shape, and a place of its own for every element; then autograd knows
    that what it may have saved of out is overwritten."""
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)
    if out.shape == shape and out.is_contiguous():
        return
    span = 0  # from the innermost dimension outwards: each step must leave all before it behind
    for stride, size in sorted(zip(out.stride(), out.shape)) if out.shape == shape else [(0, 2)]:
        if size > 1 and stride <= span:
            raise ValueError(f"{launcher}: out is {tuple(out.shape)} with strides {out.stride()}; it must be "
                             f"{tuple(shape)}, without elements that share memory")
        span += (size - 1) * stride if size > 1 else 0


def apart(x, out, elementwise):
    """x, or a copy where a write to out might change an element of x that is still to be read.

    elementwise: x may be out itself, since each element is read before it is written."""
    if elementwise and (x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()):
        return x
    low, start = x.data_ptr(), out.data_ptr()
    return x.clone() if low < start + extent(out) and start < low + extent(x) else x


def extent(x):
    """Bytes from the first element of a tensor to the end of its last."""
    last = x.numel() - 1 if x.is_contiguous() else sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.element_size() * (1 + last)
