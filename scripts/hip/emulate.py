"""Run kernels of AMD's code objects with the instructions of tinygrad's CDNA emulator, on a CPU.

Runs in the root of a toolchain with a checkout of tinygrad on PYTHONPATH. It reads a job per line, as JSON
(`scripts.hip.execution`), and prints for each the seconds and the buffers, or an error. Workgroups are run
here and not by the emulator's `run_asm`, which gives all waves of a workgroup the same scratch memory, and
which reads beyond its LDS when a lane that is switched off holds another address. It also adds a register to
the address of flat instructions; see `without_base`.
"""

import ctypes
import importlib
import itertools
import json
import mmap
import re
import struct
import sys
import time
from pathlib import Path
from typing import Any

WAVE, LDS_SPACE, LDS_OFFSETS, KERNARGS = 64, 1 << 32, 1 << 17, 1 << 16
UNRESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
ROUNDS, INSTRUCTIONS = 100_000, 2_000_000  # between barriers
LOAD, DYNAMIC_SYMBOLS, RELOCATIONS = 1, 11, 4
ABSOLUTE, RELATIVE = 3, 13  # R_AMDGPU_ABS64, R_AMDGPU_RELATIVE64
HIDDEN = re.compile(r"hidden_(block_count|group_size|remainder)_([xyz])")
# Fields of the encoding FLAT of CDNA: flat instructions have segment 0, others use scratch or global memory.
FLAT, SEGMENT, BASE, NO_BASE = 0b110111, 3 << 14, 0x7F << 16, 0x7F << 16
UNDEFINED_BYTE = 0xFF  # NaN in every type: uninitialized memory that is read shows


class Code:
    """A code object in memory, relocated; ``symbols`` are offsets from ``address``."""

    def __init__(self, content: bytes) -> None:
        programs, sections = struct.unpack_from("<QQ", content, 32)
        size, count, section_size, section_count = struct.unpack_from("<HHHH", content, 54)
        segments = [struct.unpack_from("<IIQQQQQQ", content, programs + i * size) for i in range(count)]
        loaded = [segment for segment in segments if segment[0] == LOAD]
        self.memory, self.address = allocate(max(segment[3] + segment[6] for segment in loaded))
        for _, _, start, at, _, length, *_ in loaded:
            self.memory[at : at + length] = content[start : start + length]
        tables = [
            struct.unpack_from("<IIQQQQIIQQ", content, sections + i * section_size)
            for i in range(section_count)
        ]
        names, values = [], []
        for table in (table for table in tables if table[1] == DYNAMIC_SYMBOLS):
            strings = tables[table[6]][4]
            for at in range(table[4], table[4] + table[5], 24):
                name, value = struct.unpack_from("<I4xQ", content, at)
                names.append(content[strings + name : content.index(b"\0", strings + name)].decode())
                values.append(value)
        self.symbols = dict(zip(names, values, strict=True))
        for table in (table for table in tables if table[1] == RELOCATIONS):
            for at in range(table[4], table[4] + table[5], 24):
                place, kind, symbol, addend = struct.unpack_from("<QIIq", content, at)
                if kind not in (ABSOLUTE, RELATIVE):
                    raise RuntimeError(f"relocation {kind} is not supported")
                target = values[symbol] if kind == ABSOLUTE else 0
                struct.pack_into("<Q", self.memory, place, self.address + target + addend)


def allocate(size: int) -> tuple[mmap.mmap, int]:
    """Return zeroed memory and its address."""
    memory = mmap.mmap(-1, size)
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def arguments(launch: dict[str, Any], addresses: list[int]) -> bytes:
    """Return the bytes of the kernel's arguments, explicit and hidden ones, by the kernel's metadata."""
    packed = bytearray(KERNARGS)
    explicit = iter(launch["values"])
    for kind, offset, size in launch["arguments"]:
        if hidden := HIDDEN.fullmatch(kind):
            axis = "xyz".index(hidden[2])
            sizes = {"block_count": launch["grid"][axis], "group_size": launch["block"][axis]}
            value = sizes.get(hidden[1], 0)
        elif kind == "hidden_grid_dims":
            value = 3
        elif kind == "hidden_dynamic_lds_size":
            value = launch["lds"]
        elif kind.startswith("hidden_"):
            continue
        else:
            given = next(explicit)
            if "bytes" in given:
                packed[offset : offset + size] = bytes.fromhex(given["bytes"])
                for at, buffer in given["pointers"]:
                    struct.pack_into("<Q", packed, offset + at, addresses[buffer])
                continue
            value = addresses[given["buffer"]] if "buffer" in given else given["integer"]
        packed[offset : offset + size] = value.to_bytes(size, "little", signed=value < 0)
    if next(explicit, None) is not None:
        raise RuntimeError("more values than the kernel has arguments")
    return bytes(packed)


def run(code: Code, launch: dict[str, Any], addresses: list[int]) -> None:
    """Execute a launch, workgroup by workgroup."""
    emu = importlib.import_module("test.mockgpu.amd.emu")
    device, kinds = importlib.import_module("tinygrad.device"), importlib.import_module("tinygrad.dtype")
    descriptor = code.symbols[launch["kernel"] + ".kd"]
    static, scratch = struct.unpack_from("<II", code.memory, descriptor)
    (entry,) = struct.unpack_from("<q", code.memory, descriptor + 16)
    (resources,) = struct.unpack_from("<I", code.memory, descriptor + 52)
    properties, preload = struct.unpack_from("<HH", code.memory, descriptor + 56)
    grid, block = launch["grid"], launch["block"]
    threads = block[0] * block[1] * block[2]
    kernargs, kernargs_at = allocate(KERNARGS)
    kernargs[:] = arguments(launch, addresses)
    packet, packet_at = allocate(4096)
    items = [size * count for size, count in zip(grid, block, strict=True)]
    struct.pack_into("<6H5I", packet, 0, 2, 3, *block, 0, *items, scratch, static + launch["lds"])
    # User registers, in this order if enabled: LLVM's AMDGPUUsage, "Initial Kernel Execution State".
    user = []
    for bit, words in enumerate(([0] * 4, halves(packet_at), [0, 0], halves(kernargs_at), [0, 0], [0, 0])):
        user += words if properties >> bit & 1 else []
    if length := preload & 0x7F:
        user += struct.unpack_from(f"<{length}I", kernargs, (preload >> 7) * 4)
    user += [0] * ((resources >> 1 & 31) - len(user))
    lds_memory = mmap.mmap(-1, LDS_SPACE + LDS_OFFSETS, flags=UNRESERVED)
    lds_at = ctypes.addressof(ctypes.c_char.from_buffer(lds_memory))
    everything = device.Buffer("CPU", 1 << 40, kinds.dtypes.uint32, options=device.BufferSpec(external_ptr=0))
    memory_at = everything.ensure_allocated()._buf.va_addr
    scratches = [allocate(max(scratch * WAVE, 8)) for _ in range(0, threads, WAVE)]
    program: dict[int, Any] = {}
    # Not in the emulator's mode, which flushes denormals: HIP keeps them.
    for z, y, x in itertools.product(*map(range, reversed(grid))):
        ctypes.memset(lds_at, UNDEFINED_BYTE, 65536)
        waves = []
        for number, start in enumerate(range(0, threads, WAVE)):
            ctypes.memset(scratches[number][1], UNDEFINED_BYTE, max(scratch * WAVE, 8))
            state = emu._init_wave(
                code.address + descriptor + entry,
                start,
                threads,
                *block,
                kernargs_at,
                resources,
                scratch,
                "cdna",
                x,
                y,
                z,
                user,
                WAVE,
            )
            places = (
                state.sgpr_buf._buf.va_addr,
                state.vgpr_buf._buf.va_addr,
                memory_at,
                lds_at,
                scratches[number][1],
                state.accvgpr_buf._buf.va_addr,
            )
            waves.append((state, [ctypes.c_uint64(place) for place in places]))
        run_workgroup(emu, waves, program)


def run_workgroup(emu: Any, waves: list[Any], program: dict[int, Any]) -> None:
    """Run the waves of a workgroup in turn, each to its next barrier or its end."""
    for _ in range(ROUNDS):
        waves = [wave for wave in waves if not reached_end(emu, wave, program)]
        if not waves:
            return
    raise RuntimeError(f"more than {ROUNDS} barriers")


def reached_end(emu: Any, wave: Any, program: dict[int, Any]) -> bool:
    """Run a wave and return whether it ended; otherwise it is at a barrier."""
    state, places = wave
    for _ in range(INSTRUCTIONS):
        at = state.pc
        if at == emu.ENDPGM_PC:
            return True
        if at not in program:
            without_base(at)
            (compiled, runtime), instruction = emu._decode_at(at, "cdna")
            barrier = getattr(instruction, "op", None) in emu._BARRIER_OPS
            program[at] = runtime.fxn, compiled.arg.globals, barrier
        function, used, barrier = program[at]
        function(*[places[index] for index in used])
        if barrier:
            return False
    raise RuntimeError(f"more than {INSTRUCTIONS} instructions without a barrier")


def without_base(at: int) -> None:
    """Set the field of the scalar base to "none" in a flat instruction, where the processor ignores it."""
    words = (ctypes.c_uint32 * 2).from_address(at)
    if words[0] >> 26 == FLAT and not words[0] & SEGMENT:
        words[1] = words[1] & ~BASE | NO_BASE


def halves(address: int) -> list[int]:
    """Return an address as two 32-bit words."""
    return [address & 0xFFFFFFFF, address >> 32]


def execute(job: dict[str, Any], codes: dict[str, Code]) -> list[str]:
    """Run the launches of a job, which share its buffers, and return the results among these, in hex."""
    if job["code"] not in codes:
        codes[job["code"]] = Code(Path(job["code"]).read_bytes())
    lengths = [len(content) // 2 for content in job["buffers"]]
    allocated = [allocate(max(length, 1)) for length in lengths]
    addresses = [address for _, address in allocated]
    for (memory, _), content, length in zip(allocated, job["buffers"], lengths, strict=True):
        memory[:length] = bytes.fromhex(content)
    for buffer, at, target in job["pointers"]:
        struct.pack_into("<Q", allocated[buffer][0], at, addresses[target])
    for launch in job["launches"]:
        run(codes[job["code"]], launch, addresses)
    return [allocated[index][0][: lengths[index]].hex() for index in job["results"]]


def main() -> None:
    """Run the jobs of standard input, and print the result of each at once."""
    codes: dict[str, Code] = {}
    for line in sys.stdin:
        job = json.loads(line)
        started = time.monotonic()
        result: dict[str, Any] = {"id": job["id"]}
        try:
            result["buffers"] = execute(job, codes)
        except Exception as error:  # reported with the job
            result["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps(result | {"seconds": round(time.monotonic() - started, 1)}), flush=True)


if __name__ == "__main__":
    main()
