"""A pretend GPU: CPU tensors that say they are on cuda:0 and behave at the borders as CUDA tensors
do.

    with PretendGPU() as gpu:
        x = torch.ones(3, device="cuda"); x.device     # cuda:0
        x + torch.ones(3)                              # torch's own error about two devices
        x.sum().item()                                 # works, and is counted:
                                                       gpu.syncs["_local_scalar_dense", call site]
    print(gpu.report())

It needs a torch build without CUDA. It checks three things.

- Devices: two devices in one operation (CPU tensors of no dimension excepted, as in torch), indices
  on the other device, `.numpy()`.
- Host reads: item, tolist, cpu, bool, nonzero, indexing by a boolean mask, and blocking copies to
  the device are counted by the innermost call site inside rlkit. They raise under
  torch.cuda.set_sync_debug_mode("error") and inside a capture.
- Captures: torch.cuda.CUDAGraph records operations without carrying out what writes in place. Its
  replay does them again over the same buffers. A pool of memory is dead once the last graph that
  was captured into it is gone, as in CUDA's allocator.

For every attention call it records the kernel that torch's CUDA rules would choose
(`gpu.attention`); the MATH kernel computes it.

It says nothing about speed, about memory (but `oom_at` raises torch.OutOfMemoryError at the n-th
large allocation), about reuse of memory inside graphs, about the numerics of kernels, or about
several streams and devices. Autocast uses the CPU's lists of operations, and a tensor subclass
takes the single-tensor path of optimizers, so fused ones are not seen.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import types
import weakref
from typing import Any
from unittest import mock

import torch
import torch.nn.attention.varlen
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
CAPTURE_ERROR = "CUDA error: operation not permitted when stream is capturing"
# Operations whose CUDA kernels read a result on the host.
HOST = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "_local_scalar_dense",
    "bincount",
}
# Operations that take tensors of two devices.
MIXED = {"copy_", "_to_copy", "copy", "set_", "detach", "lift_fresh", "_copy_from"}


class Pretend(torch.Tensor):
    """A tensor on cuda:0 whose data, `elem`, are in the memory of the CPU."""

    elem: torch.Tensor

    @staticmethod
    def __new__(cls, elem: torch.Tensor) -> Any:
        new = torch.Tensor._make_wrapper_subclass(
            cls,
            elem.size(),
            strides=elem.stride(),
            storage_offset=elem.storage_offset(),
            dtype=elem.dtype,
            layout=elem.layout,
            device="cpu",
        )
        new.elem = elem
        return new

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu = PretendGPU.active
        if gpu is None:
            raise RuntimeError("a pretend CUDA tensor outlived its PretendGPU")
        return gpu.run(func, args, kwargs or {})

    def __tensor_flatten__(
        self,
    ) -> Any:  # lets nn.Module.to keep the Parameter object, as it does for CUDA
        return ["elem"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Pretend(inner["elem"])

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"{self.elem!r} (pretend cuda:0)"

    def __reduce_ex__(self, protocol: int) -> Any:  # a checkpoint holds plain tensors
        plain = self.elem.detach().clone()
        return (
            torch.nn.Parameter(plain, self.requires_grad)
            if isinstance(self, torch.nn.Parameter)
            else plain
        ).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                new = Pretend(self.elem.detach().clone())
            new.requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                new._is_param = True
            memo[id(self)] = new
        return memo[id(self)]

    # C++ believes that it is on the CPU, so that autograd needs no CUDA queue; Python is told
    # otherwise.
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)

    def get_device(self) -> int:
        return 0

    def cuda(self, *_: Any, **__: Any) -> Any:
        return self

    def cpu(self, *_: Any, **__: Any) -> Any:
        return to_host(self)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            kwargs |= {"device": args[0].device, "dtype": args[0].dtype}
            args = args[1:]
        copy = kwargs.pop("copy", False)
        device, dtype, blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "cpu":
            return to_host(self, dtype=dtype, non_blocking=blocking)
        if dtype is None or dtype == self.dtype:
            return self.clone() if copy else self
        return aten._to_copy.default(self, dtype=dtype)

    def untyped_storage(self) -> Any:
        return self.elem.untyped_storage()

    def data_ptr(self) -> int:
        return self.elem.data_ptr()

    def new_tensor(self, data: Any, **kwargs: Any) -> Any:
        return torch.tensor(data, **{"dtype": self.dtype, "device": CUDA} | kwargs)

    def tolist(self) -> Any:
        return to_host(self).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the"
                " tensor to host memory first."
            )
        return self.cpu().numpy()


def to_host(x: Any, **kwargs: Any) -> Any:
    gpu = PretendGPU.active
    assert gpu is not None
    gpu.to_host = True
    try:
        return aten._to_copy.default(x, device=torch.device("cpu"), **kwargs)
    finally:
        gpu.to_host = False


def inner(x: Any) -> Any:
    return x.elem if isinstance(x, Pretend) else x


def is_view(out: Any, given: Any) -> bool:
    """True where every tensor of `out` lies in the memory of one of `given`."""
    memories = {
        g.untyped_storage().data_ptr()
        for g in tree_flatten(given)[0]
        if isinstance(g, torch.Tensor)
    }
    return all(
        o.untyped_storage().data_ptr() in memories
        for o in tree_flatten(out)[0]
        if isinstance(o, torch.Tensor)
    )


def in_device_context() -> bool:
    """Whether `with torch.device("cuda")` is in force."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(m, DeviceContext) and m.device.type == "cuda" for m in modes)


class Graph:
    """torch.cuda.CUDAGraph: records operations, and does them again."""

    def __init__(self, *_: Any, **__: Any):
        self.ops: list[Any] = []
        self.pool: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        gpu = PretendGPU.active
        assert gpu is not None and gpu.capturing is None, "nested capture"
        if not gpu.on_side_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        self.pool = pool or gpu.new_pool()
        gpu.hold_pool(self.pool)
        gpu.capturing, gpu.capture_broken = self, False

    def capture_end(self) -> None:
        gpu = PretendGPU.active
        assert gpu is not None
        gpu.capturing = None
        gpu.captures += 1
        if gpu.capture_broken:
            self.ops.clear()
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        # torch tells the allocator only of a capture that has ended well
        weakref.finalize(self, gpu.release_pool, self.pool).atexit = False

    def replay(self) -> None:
        gpu = PretendGPU.active
        assert gpu is not None
        gpu.replays += 1
        math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        # what autocast does was recorded as operations of their own
        with gpu.below(), math, torch.autocast("cpu", enabled=False):
            for func, args, kwargs, outs in self.ops:
                result = func(*args, **kwargs)
                for kept, new in (
                    zip(outs, tree_flatten(result)[0], strict=True) if outs is not None else ()
                ):
                    if isinstance(kept, torch.Tensor) and kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)


class PretendGPU(TorchDispatchMode):
    active: PretendGPU | None = None

    def __init__(
        self,
        *,
        roots: tuple[str, ...] = ("/rlkit/",),
        capability: tuple[int, int] = (9, 0),
        memory: int = 141 << 30,
    ):
        super().__init__()
        self.roots, self.capability, self.memory = roots, capability, memory
        self.syncs: collections.Counter[tuple[str, str]] = collections.Counter()
        self.attention: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self.float64: collections.Counter[tuple[str, str]] = collections.Counter()
        self.plans: set[Any] = set()  # shapes of which cuDNN makes a plan each
        self.kernels = 0  # operations on the device
        self.capturing: Graph | None = None
        self.capture_broken, self.on_side_stream = False, False
        self.sync_mode = "default"
        self.to_host = (
            False  # Python asks for a copy on the host; C++ asks for the device that it believes in
        )
        self.lenient = False  # inside of one call of attention
        self.captures = self.replays = 0
        self.pools: dict[Any, int] = {}  # of memory → graphs that hold it; dead at 0
        self.handles = itertools.count(1)
        self.oom_at: int | None = None  # raises at the so-many-th allocation above `oom_bytes`
        self.oom_bytes = 1 << 20
        self.large = 0
        self.stack = contextlib.ExitStack()
        self.largest: list[tuple[int, str, str]] = []

    # ------------------------------------------------------------------------------ switching it on

    def __enter__(self) -> Any:
        PretendGPU.active = self
        for where, name, value in patches(self):
            self.stack.enter_context(mock.patch.object(where, name, value, create=True))
        super().__enter__()
        return self

    def __exit__(self, *given: Any) -> None:
        super().__exit__(*given)
        self.stack.close()
        PretendGPU.active = None

    def below(self) -> Any:
        return _disable_current_modes()

    # ---------------------------------------------------------------------------- pools of memory

    def new_pool(self) -> tuple[int, int]:
        return 0, next(self.handles)

    def hold_pool(self, pool: Any) -> None:
        """One graph more is captured into this pool. Raises: RuntimeError where it is dead."""
        if self.pools.get(pool) == 0:
            raise RuntimeError(
                "it->second->use_count > 0 INTERNAL ASSERT FAILED at"
                ' "/pytorch/c10/cuda/CUDACachingAllocator.cpp":2690, please report a bug'
            )
        self.pools[pool] = self.pools.get(pool, 0) + 1

    def release_pool(self, pool: Any) -> None:
        self.pools[pool] -= 1

    # ----------------------------------------------------------------------------------- operations

    def site(self) -> str:
        """The innermost line of rlkit that is running, and the library that it called, where there
        is one."""
        frame: Any = sys._getframe(1)
        library = ""
        while frame is not None:
            file = frame.f_code.co_filename
            if (
                any(root in file for root in self.roots)
                and "pretend_gpu" not in file
                and "site-packages" not in file
            ):
                own = file[file.rindex("/rlkit/") + 1 if "/rlkit/" in file else 0 :]
                return f"{own}:{frame.f_lineno} {frame.f_code.co_name}{library}"
            if not library and "site-packages" in file and "/torch/" not in file:
                library = f"  [in {file.split('site-packages/')[1]}:{frame.f_lineno}]"
            frame = frame.f_back
        return "outside" + library

    def sync(self, what: str) -> None:
        if self.capturing is not None:
            self.capture_broken = True
            raise RuntimeError(CAPTURE_ERROR)
        if self.sync_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        self.syncs[what, self.site()] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operation: its devices are checked, host reads are counted, and the CPU carries it
        out."""
        flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        pretend = [x for x in flat if isinstance(x, Pretend)]
        asked = kwargs.get("device")
        if not pretend and (asked is None or torch.device(asked).type != "cuda"):
            with self.below():
                out = func(*args, **kwargs)
            return (
                tree_map(lambda o: Pretend(o) if isinstance(o, torch.Tensor) else o, out)
                if self.lenient
                else out
            )
        if asked is not None and (self.lenient or (pretend and not self.to_host)):
            kwargs = kwargs | {
                "device": CUDA
            }  # C++ asks for the device that it believes in, the CPU
        name = func._schema.name.split("::")[1]
        on_cuda = self.devices(
            func,
            name,
            args,
            pretend,
            [x for x in flat if not isinstance(x, Pretend)],
            kwargs.get("device"),
        )
        self.count_host_reads(name, args, kwargs)
        self.kernels += 1
        given, named = tree_map(inner, args), tree_map(inner, kwargs)
        if "device" in named and named["device"] is not None:
            named["device"] = torch.device("cpu")
        named.pop("pin_memory", None)
        if func._schema.is_mutable and self.capturing is not None and on_cuda:
            self.capturing.ops.append((func, given, named, None))
            return self.written(func, args, kwargs)
        with self.below():
            out = func(*given, **named)
        self.allocated(out, name)
        if self.capturing is not None and on_cuda and not is_view(out, (given, named)):
            self.capturing.ops.append((func, given, named, tree_flatten(out)[0]))
        return self.wrapped(out, pretend, func._schema.is_mutable) if on_cuda else out

    def count_host_reads(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        masked = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if (
            name in HOST
            or masked
            or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        ):
            self.sync("boolean mask" if masked else name)
        if name in ("_to_copy", "copy_"):
            self.copies(name, args, kwargs)

    def written(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operation in place gives where it is recorded and not carried out: the tensors
        that it writes."""
        out = [
            a
            for a, s in zip(args, func._schema.arguments, strict=False)
            if s.alias_info is not None and s.alias_info.is_write
        ]
        out += [kwargs["out"]] if "out" in kwargs else []
        return (
            None
            if not func._schema.returns
            else out[0]
            if len(func._schema.returns) == 1
            else tuple(out)
        )

    def wrapped(self, out: Any, pretend: list[Any], mutable: bool) -> Any:
        originals = {id(x.elem): x for x in pretend} if mutable else {}
        # A view of a normal tensor is normal, even in inference mode.
        normal = torch.is_inference_mode_enabled() and any(not x.is_inference() for x in pretend)
        with torch.inference_mode(False) if normal else contextlib.nullcontext():
            return tree_map(
                lambda o: (
                    (originals[id(o)] if id(o) in originals else Pretend(o))
                    if isinstance(o, torch.Tensor)
                    else o
                ),
                out,
            )

    def allocated(self, out: Any, name: str) -> None:
        for o in tree_flatten(out)[0]:
            if isinstance(o, torch.Tensor):
                if o.dtype == torch.float64 and o.dim():
                    self.float64[name, self.site()] += 1
                size = o.numel() * o.element_size()
                if size >= self.oom_bytes:
                    self.large += 1
                    if self.oom_at is not None and self.large >= self.oom_at:
                        self.oom_at = None
                        raise torch.OutOfMemoryError(
                            "CUDA out of memory. Tried to allocate 2.00 GiB (pretended)."
                        )

    def devices(
        self, func: Any, name: str, args: Any, pretend: list[Any], plain: list[Any], device: Any
    ) -> bool:
        """Raises torch's error where an operation mixes devices; whether what comes out is on
        CUDA."""
        if device is not None:
            return torch.device(device).type == "cuda"
        if name in MIXED:
            return not args or isinstance(args[0], Pretend)
        if name in (
            "index",
            "index_put",
            "index_put_",
            "_index_put_impl_",
            "_unsafe_index",
            "_unsafe_index_put",
        ):
            source = args[0]
            if not isinstance(source, Pretend) and any(isinstance(i, Pretend) for i in args[1]):
                raise RuntimeError(
                    "indices should be either on cpu or on the same device as the indexed tensor"
                    " (cpu)"
                )
            if (
                name.startswith("index_put")
                and len(args) > 2
                and not isinstance(args[2], Pretend)
                and args[2].dim()
            ):
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but got values is on cpu,"
                    " different from other tensors on cuda:0"
                )
            if isinstance(source, Pretend) and any(
                i is not None and not isinstance(i, Pretend) for i in args[1]
            ):
                self.sync("index from the host")
            return isinstance(source, Pretend)
        odd = (
            []
            if self.lenient
            else [
                x
                for x in plain
                if x.dim() > 0
                or name in ("cat", "stack", "gather", "scatter", "embedding", "masked_scatter")
            ]
        )
        if pretend and odd:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" cuda:0 and cpu! ({func})"
            )
        return bool(pretend)

    def copies(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        asked = kwargs.get("device")
        source, target = (args[0], None) if name == "_to_copy" else (args[1], args[0])
        from_cuda = isinstance(source, Pretend)
        if name == "copy_":
            to, blocking = (
                isinstance(target, Pretend),
                not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)),
            )
        else:
            to = from_cuda if asked is None else torch.device(asked).type == "cuda"
            blocking = not kwargs.get("non_blocking", False)
        if from_cuda and not to:
            self.sync("to host")
        elif to and not from_cuda and blocking and isinstance(source, torch.Tensor):
            self.sync("to device")

    # ------------------------------------------------------------------------------------ attention

    def choose(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
        enable_gqa: bool = False,
    ) -> None:
        """Record the kernel that torch 2.13 would choose on Hopper or Ada
        (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp)."""
        dtype = (
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled() else query.dtype
        )  # attention is on the list that is cast
        half = dtype in (torch.float16, torch.bfloat16)
        grad = any(t.requires_grad for t in (query, key, value))
        heads = query.shape[1] != key.shape[1]
        same = not heads or (enable_gqa and query.shape[1] % key.shape[1] == 0)
        size, backends = query.shape[-1], torch.backends.cuda
        able = {
            "cudnn": (
                half
                and same
                and size <= 128
                and size % 8 == 0
                and key.shape[2] != 1
                and backends.cudnn_sdp_enabled()
            ),
            "flash": (
                half
                and same
                and attn_mask is None
                and size <= 256
                and not (is_causal and query.shape[2] != key.shape[2])
                and backends.flash_sdp_enabled()
            ),
            "efficient": (
                not heads
                and size % (8 if half else 4) == 0
                and backends.mem_efficient_sdp_enabled()
            ),
            "math": True,
        }
        hopper = self.capability[0] in (9, 10)  # with cuDNN above 9.15, which torch 2.13 brings
        order = (
            ("cudnn", "flash", "efficient", "math") if hopper else ("flash", "efficient", "math")
        )
        kernel = next(name for name in order if able[name])
        if kernel == "cudnn":
            self.plans.add(
                (tuple(query.shape), tuple(key.shape), attn_mask is not None, is_causal, grad)
            )
        scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
        self.attention[
            kernel,
            str(dtype).removeprefix("torch."),
            "mask" if attn_mask is not None else "causal" if is_causal else "full",
            f"gqa{'+enable' if enable_gqa else ''}" if heads else "mha",
            "grad" if grad else "nograd",
            self.site(),
        ] += 1
        if kernel == "math":
            self.largest.append((scores, f"{tuple(query.shape)} × {tuple(key.shape)}", self.site()))

    def report(self, top: int = 40) -> str:
        lines = [
            f"kernels {self.kernels}, captures {self.captures}, replays {self.replays}, syncs"
            f" {sum(self.syncs.values())}"
        ]
        lines += [
            f"  sync {n:6d}  {what:22s} {site}" for (what, site), n in self.syncs.most_common(top)
        ]
        lines.append(f"  cuDNN plans: {len(self.plans)}")
        lines += [f"  attention {n:6d}  {k}" for k, n in self.attention.most_common(top)]
        lines += [f"  float64 {n:6d}  {k}" for k, n in self.float64.most_common(top)]
        for scores, shape, site in sorted(set(self.largest), reverse=True)[:3]:
            lines.append(f"  largest math scores: {scores:,} entries {shape} {site}")
        return "\n".join(lines)


def segments_by_rows(
    attention: Any,
    query: Any,
    key: Any,
    value: Any,
    ends_q: list[int],
    ends_k: list[int],
    *,
    window_size: Any,
    scale: Any,
    enable_gqa: bool,
) -> Any:
    """What flash attention computes for segments of many lengths: the queries of each are at the
    end of its keys."""
    assert window_size == (-1, 0) and enable_gqa, "only causal, grouped attention is asked for"
    parts = []
    for q0, q1, k0, k1 in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=query.device).tril(
            k1 - k0 - q1 + q0
        )
        parts.append(
            attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(parts)


def rows_by_pages(
    attention: Any,
    query: Any,
    key: Any,
    value: Any,
    lengths: Any,
    table: Any,
    *,
    enable_gqa: bool,
) -> Any:
    """What flash attention computes for one query a row over pages [pages, page, Hk, D]. Operations
    of tensors alone, so that a captured graph sees the table as it is at each replay."""
    key, value = (x[table.long()].flatten(1, 2).transpose(1, 2) for x in (key, value))
    seen = torch.arange(key.shape[2], device=query.device) < lengths[:, None]
    return attention(
        query[:, :, None], key, value, attn_mask=seen[:, None, None], enable_gqa=enable_gqa
    )[:, :, 0]


class Event:
    def __init__(self, *_: Any, **__: Any): ...
    def record(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class Stream(Event):
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def record_event(self, *_: Any) -> Any:
        return Event()


def patches(gpu: PretendGPU) -> list[tuple[Any, str, Any]]:
    cuda = torch.cuda
    default = Stream()

    @contextlib.contextmanager
    def stream(s: Any) -> Any:
        before, gpu.on_side_stream = gpu.on_side_stream, s is not default and s is not None
        try:
            yield
        finally:
            gpu.on_side_stream = before

    def synchronize(*_: Any) -> None:
        if gpu.capturing is not None:
            gpu.capture_broken = True
            raise RuntimeError(CAPTURE_ERROR)
        gpu.syncs["synchronize()", gpu.site()] += 1

    def set_mode(mode: Any) -> None:
        gpu.sync_mode = {0: "default", 1: "warn", 2: "error"}.get(mode, mode)

    def making(make: Any) -> Any:  # these copy below the dispatcher
        @functools.wraps(make)
        def made(
            data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any
        ) -> Any:
            if device is None:
                device = CUDA if isinstance(data, Pretend) or in_device_context() else None
            if device is None or torch.device(device).type != "cuda":
                return (
                    make(data, *args, device=device, **kwargs).requires_grad_(requires_grad)
                    if requires_grad
                    else make(data, *args, device=device, **kwargs)
                )
            if isinstance(data, Pretend):
                return (
                    data.to(**kwargs) if make is as_tensor else data.detach().clone().to(**kwargs)
                )
            new = to(make(data, *args, device="cpu", **kwargs), CUDA)
            return new.requires_grad_(requires_grad) if requires_grad else new

        return made

    as_tensor = torch.as_tensor
    attention = torch.nn.functional.scaled_dot_product_attention

    def sdpa(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(query, Pretend):
            return attention(query, key, value, *args, **kwargs)
        gpu.choose(query, key, value, *args, **kwargs)
        before, gpu.lenient = gpu.lenient, True
        try:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                return attention(query, key, value, *args, **kwargs)
        finally:
            gpu.lenient = before

    def varlen_attn(
        query: Any,
        key: Any,
        value: Any,
        ends_q: Any,
        ends_k: Any,
        *_: Any,
        seqused_k: Any = None,
        block_table: Any = None,
        **settings: Any,
    ) -> Any:
        gpu.attention["varlen", str(query.dtype).removeprefix("torch."), gpu.site()] += 1
        # as the kernel demands
        assert ends_q.elem.is_contiguous() and ends_k.elem.is_contiguous()
        before, gpu.lenient = gpu.lenient, True
        try:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                if block_table is not None:
                    return rows_by_pages(
                        attention, query, key, value, seqused_k, block_table, **settings
                    )
                ends = [end.elem.tolist() for end in (ends_q, ends_k)]
                return segments_by_rows(attention, query, key, value, *ends, **settings)
        finally:
            gpu.lenient = before

    class Autocast(torch.amp.autocast_mode.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any):
            super().__init__("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    plain_to = torch._C.TensorBase.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, Pretend) or (
            args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], Pretend)
        ):
            return plain_to(self, *args, **kwargs)
        if args and isinstance(args[0], Pretend):
            args, kwargs = (CUDA, args[0].dtype), kwargs
        if "cuda" not in str(args) + str(kwargs):
            return plain_to(self, *args, **kwargs)
        kwargs.pop("copy", None)
        _, dtype, blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return aten._to_copy.default(self, device=CUDA, dtype=dtype, non_blocking=blocking)

    enabled = torch.is_autocast_enabled
    autocast_dtype = torch.get_autocast_dtype
    properties = types.SimpleNamespace(
        name="Pretend GPU",
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory,
        multi_processor_count=132,
        gcnArchName="",
        warp_size=32,
    )
    fixed = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_initialized": True,
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "get_device_capability": gpu.capability,
        "get_device_name": "Pretend GPU",
        "get_device_properties": properties,
        "utilization": 0,
        "memory_allocated": 1 << 30,
        "max_memory_allocated": 1 << 30,
        "memory_reserved": 2 << 30,
        "max_memory_reserved": 2 << 30,
        "mem_get_info": (gpu.memory - (4 << 30), gpu.memory),
        "current_stream": default,
        "default_stream": default,
    }
    nothing = (
        "set_device",
        "_lazy_init",
        "init",
        "empty_cache",
        "ipc_collect",
        "reset_peak_memory_stats",
        "set_rng_state",
        "set_rng_state_all",
        "manual_seed",
        "manual_seed_all",
    )
    made = {
        name: lambda *_, value=value, **__: value
        for name, value in (fixed | dict.fromkeys(nothing)).items()
    } | {
        "synchronize": synchronize,
        "memory_stats": lambda *_: {},
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "Stream": lambda *_, **__: Stream(),
        "Event": Event,
        "stream": stream,
        "device": lambda *_: contextlib.nullcontext(),
        "CUDAGraph": Graph,
        "graph_pool_handle": gpu.new_pool,
        "get_sync_debug_mode": lambda: ("default", "warn", "error").index(gpu.sync_mode),
        "set_sync_debug_mode": set_mode,
        "is_current_stream_capturing": lambda: gpu.capturing is not None,
    }
    others = [
        (torch, "tensor", making(torch.tensor)),
        (torch, "as_tensor", making(as_tensor)),
        (torch.version, "cuda", "13.0"),
    ]
    others += [
        (torch.nn.functional, "scaled_dot_product_attention", sdpa),
        (torch, "autocast", Autocast),
    ]
    others += [(torch.nn.attention.varlen, "varlen_attn", varlen_attn)]
    others += [
        (torch.Tensor, "to", to),
        (torch.Tensor, "cuda", lambda self, *_, **__: to(self, CUDA)),
    ]
    others += [
        (torch, "is_autocast_enabled", lambda kind="cpu": enabled("cpu")),
        (torch, "get_autocast_dtype", lambda kind="cpu": autocast_dtype("cpu")),
    ]
    others += [
        (torch._C, "_cuda_endAllocateToPool", lambda index, pool: None),
        (torch._C, "_cuda_releasePool", lambda index, pool: gpu.release_pool(pool)),
    ]
    return [(cuda, name, value) for name, value in made.items()] + others
