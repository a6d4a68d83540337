"""roundoff.record.disk.tensors: every dtype comes back bit for bit, and each content is stored once."""

from __future__ import annotations

import os
import time

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.record.disk import tensors as module
from roundoff.record.disk.tensors import (
    Chunks,
    DamagedError,
    TensorFile,
    checksum,
    content_hash,
)

# All that torch can make of bytes, the odd ones included; those that this torch lacks are left out.
NAMES = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float4_e2m1fn_x2 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool "
    "complex128 complex64 complex32"
).split()
DTYPES = [getattr(torch, name) for name in NAMES if hasattr(torch, name)]
SHAPES = [(), (0,), (1,), (3, 0, 2), (5,), (2, 3, 4)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def make(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Any bits at all: NaN payloads, subnormals, infinities."""
    count = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(
        high, (max(count, 1) * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return data.view(dtype)[:count].reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path, dtype):
    chunks = Chunks(tmp_path)
    given = {f"{i}": make(dtype, shape, i) for i, shape in enumerate(SHAPES)}
    # a byte in front shifts what follows to odd places in the file
    stored = {"odd": chunks.add("odd", torch.ones(1, dtype=torch.uint8))}
    for key, tensor in given.items():
        stored[key] = chunks.add(key, tensor)
    chunks.finish()
    (path,) = tmp_path.iterdir()
    for key, tensor in given.items():
        back = TensorFile(path).read(stored[key])
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert bits(back) == bits(tensor)
        # kernels read two numbers of 8 bytes at once, only from places that are aligned
        assert not back.numel() or back.data_ptr() % dtype.itemsize == 0


def test_files_are_plain_safetensors(tmp_path):
    tmp_path = (
        tmp_path / "step"
    )  # pytest's own folder is closed to others whatever the umask
    tmp_path.mkdir()
    chunks = Chunks(tmp_path)
    chunks.add("7", torch.tensor([1.5, -0.0]))
    chunks.finish()
    back = safetensors.torch.load_file(tmp_path / "tensors-000.safetensors")
    assert torch.equal(back["7"], torch.tensor([1.5, -0.0]))
    # others may read what this user writes as far as the umask says
    other = tmp_path / "other"
    other.touch()
    assert (tmp_path / "tensors-000.safetensors").stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.T,
        lambda x: x[1:, ::2],
        lambda x: x[:1].expand(4, 5),
        lambda x: x.as_strided((3, 3), (1, 1)),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: torch.nn.Parameter(x),
    ],
)
def test_views_are_stored_as_what_they_show(tmp_path, view):
    shown = view(torch.arange(20.0).reshape(4, 5))
    plain = torch.tensor(
        shown.detach().resolve_conj().resolve_neg().tolist(), dtype=shown.dtype
    )
    assert content_hash(shown) == content_hash(plain)
    chunks = Chunks(tmp_path)
    chunks.add("a", shown)
    chunks.finish()
    back = TensorFile(tmp_path / "tensors-000.safetensors").read("a")
    assert back.is_contiguous()
    assert torch.equal(back, plain)


def test_the_hash_is_that_of_dtype_shape_and_bytes():
    tensor = torch.tensor([[1, 2, 3]], dtype=torch.int16)
    text = b"int16 [1, 3] " + b"\x01\x00\x02\x00\x03\x00"
    assert content_hash(tensor) == xxhash.xxh3_128_hexdigest(text)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(0, len(DTYPES) - 5),
    st.integers(0, 95),
    st.integers(0, 7),
)
def test_one_changed_bit_changes_the_hash(seed, kind, place, bit):
    tensor = make(DTYPES[kind], (2, 3, 4), seed)
    data = bytearray(bits(tensor))
    if DTYPES[kind] == torch.bool:
        bit = 0
    data[place % len(data)] ^= 1 << bit
    other = torch.frombuffer(data, dtype=DTYPES[kind]).reshape(2, 3, 4)
    assert content_hash(tensor) != content_hash(other)


def test_equal_bits_of_another_dtype_or_shape_are_other_content():
    zeros = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, 1),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int64),
        -torch.zeros(4),
    ]
    assert len({content_hash(tensor) for tensor in zeros}) == len(zeros)


def test_content_is_stored_once_and_its_key_is_told(tmp_path):
    chunks = Chunks(tmp_path, limit=64)  # several files
    first = torch.arange(8.0)
    assert chunks.add("0", first) == "0"
    assert chunks.add("1", first + 1) == "1"
    assert chunks.add("2", first.clone()) == "0"
    assert chunks.add("3", torch.arange(16.0)[:8]) == "0"
    assert chunks.add("4", first.reshape(2, 4)) == "4"
    chunks.finish()
    assert sorted(
        key for path in tmp_path.iterdir() for key in TensorFile(path).keys
    ) == ["0", "1", "4"]


def test_a_key_names_one_tensor(tmp_path):
    chunks = Chunks(tmp_path)
    chunks.add("0", torch.ones(2))
    assert chunks.add("0", torch.ones(2)) == "0"
    with pytest.raises(ValueError, match="two different tensors have the key '0'"):
        chunks.add("0", torch.zeros(2))


def test_what_is_stored_is_the_tensor_at_the_time_of_the_call(tmp_path):
    chunks = Chunks(tmp_path)
    weight = torch.zeros(3)
    chunks.add("before", weight)
    weight += 1
    chunks.add("after", weight)
    weight.fill_(9)
    chunks.finish()
    path = tmp_path / "tensors-000.safetensors"
    assert TensorFile(path).read("before").tolist() == [0, 0, 0]
    assert TensorFile(path).read("after").tolist() == [1, 1, 1]


def test_no_file_is_longer_than_the_limit_unless_one_tensor_is(tmp_path):
    chunks = Chunks(tmp_path, limit=1000)
    sizes = [400, 400, 400, 5000, 1, 999, 1000, 3]
    for i, size in enumerate(sizes):
        chunks.add(str(i), torch.full((size,), i, dtype=torch.uint8))
        assert chunks._bytes <= 1000
    chunks.finish()
    held = {}
    for path in sorted(tmp_path.iterdir()):
        held[path.name] = sum(
            TensorFile(path).read(key).numel() for key in TensorFile(path).keys
        )
        assert checksum(path) == chunks.checksums[path.name]
    assert list(held.values()) == [800, 400, 5000, 1000, 1000, 3]


def test_training_goes_on_while_a_chunk_is_written(tmp_path, monkeypatch):
    running = []

    def slow(*args, **kwargs):
        running.append(1)
        time.sleep(0.3)
        save(*args, **kwargs)

    save = safetensors.torch.save_file
    monkeypatch.setattr(module, "save_file", slow)
    chunks = Chunks(tmp_path, limit=100)
    start = time.monotonic()
    chunks.add("0", torch.ones(100))
    assert time.monotonic() - start < 0.25  # it did not wait for the 0.3 s
    chunks.finish()
    assert running
    assert os.listdir(tmp_path) == ["tensors-000.safetensors"]


def freed() -> torch.Tensor:
    tensor = torch.ones(1000)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse|quantiz).*")
@pytest.mark.parametrize(
    "make_tensor",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        freed,
    ],
    ids=["sparse", "meta", "nested", "freed"],
)
def test_what_has_no_plain_bytes_is_an_exception_and_no_crash(tmp_path, make_tensor):
    with pytest.raises((TypeError, NotImplementedError)):
        Chunks(tmp_path).add("0", make_tensor())


def test_a_mapped_tensor_may_be_changed_without_changing_the_file(tmp_path):
    chunks = Chunks(tmp_path)
    chunks.add("0", torch.zeros(3))
    chunks.finish()
    path = tmp_path / "tensors-000.safetensors"
    before = path.read_bytes()
    TensorFile(path).read("0").fill_(7)
    assert path.read_bytes() == before
    assert TensorFile(path).read("0").tolist() == [0, 0, 0]


def test_a_flipped_bit_is_found(tmp_path):
    chunks = Chunks(tmp_path)
    chunks.add("0", torch.zeros(3))
    chunks.finish()
    path = tmp_path / "tensors-000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        DamagedError, match="tensor '0' are not those that were written"
    ):
        TensorFile(path).read("0")


def test_any_byte_of_true_is_one_content(tmp_path):
    # memory that nothing was written to, as of torch.empty: what a copy makes of it is torch's
    odd = torch.tensor([0x5C, 0, 1], dtype=torch.uint8).view(torch.bool)
    ones = torch.tensor([True, False, True])
    assert content_hash(odd) == content_hash(ones)
    chunks = Chunks(tmp_path)
    key = chunks.add("odd", odd)
    assert chunks.add("ones", ones) == key
    chunks.finish()
    [path] = tmp_path.iterdir()
    assert bits(TensorFile(path).read(key)) == bytes([1, 0, 1])
