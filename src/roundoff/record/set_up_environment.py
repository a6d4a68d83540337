"""The settings of this process that change numbers, by a list of what may be noted.

No other variable of the environment is looked at, and none whose name tells of a secret.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch

from roundoff.foreign import without_secrets
from roundoff.record.environment import environment
from roundoff.record.set_up import Fact

#: Packages whose version may change numbers, where the program has imported them: by
#: the name of the module, that of the distribution.
_PACKAGES = {
    "numpy": "numpy",
    "scipy": "scipy",
    "PIL": "pillow",
    "cv2": "opencv-python",
    "torchvision": "torchvision",
    "torchaudio": "torchaudio",
    "torchcodec": "torchcodec",
    "soundfile": "soundfile",
    "librosa": "librosa",
    "decord": "decord",
    "av": "av",
    "albumentations": "albumentations",
    "kornia": "kornia",
    "nvidia.dali": "nvidia-dali",
    "webdataset": "webdataset",
    "ffcv": "ffcv",
    "datasets": "datasets",
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "sentencepiece": "sentencepiece",
    "peft": "peft",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "deepspeed": "deepspeed",
    "megatron": "megatron-core",
    "apex": "apex",
    "transformer_engine": "transformer-engine",
    "flash_attn": "flash-attn",
    "xformers": "xformers",
    "bitsandbytes": "bitsandbytes",
    "triton": "triton",
    "timm": "timm",
    "torch_npu": "torch-npu",
    "intel_extension_for_pytorch": "intel-extension-for-pytorch",
}
#: Variables that change numbers, or the order of sums.
_VARIABLES = re.compile(
    "OMP_NUM_THREADS|OMP_DYNAMIC|MKL_NUM_THREADS|MKL_CBWR|MKL_ENABLE_INSTRUCTIONS"
    "|OPENBLAS_NUM_THREADS|OPENBLAS_CORETYPE|VECLIB_MAXIMUM_THREADS|NUMEXPR_NUM_THREADS"
    "|KMP_DETERMINISTIC_REDUCTION|ATEN_CPU_CAPABILITY"
    "|CUBLAS_WORKSPACE_CONFIG|CUBLASLT_[A-Z_]+|CUDNN_[A-Z_]+|CUDA_LAUNCH_BLOCKING"
    "|NVIDIA_TF32_OVERRIDE|NVTE_[A-Z0-9_]+|FLASH_ATTENTION_[A-Z_]+"
    "|NCCL_(?:ALGO|PROTO|NVLS_ENABLE|COLLNET_ENABLE)"
    "|(?:DNNL|ONEDNN)_[A-Z0-9_]+|MIOPEN_[A-Z0-9_]+|ROCBLAS_[A-Z_]+|HIPBLASLT_[A-Z_]+"
    "|TORCH(?:INDUCTOR|DYNAMO)?_[A-Z0-9_]+|PYTORCH_[A-Z0-9_]+|XLA_[A-Z_]+"
    "|(?:HCCL|LCCL|ASCEND|CLOSE)_[A-Z_]*(?:DETERMINISTIC|BLOCKING|ALGO)[A-Z_]*"
    "|INF_NAN_MODE_[A-Z_]+|CLOSE_MATMUL_K_SHIFT|PYTHONHASHSEED"
)
#: Of those, variables that say where files lie or what is written down.
_WITHOUT_NUMBERS = re.compile(
    "_HOME|_DIR$|_PATH|_ROOT|_FILE|_FOLDER|LOG|TRACE|DEBUG|PRINT|REPORT|VERBOSE|WARN"
    "|PROFILE|CACHE|TIMEOUT|ALLOC|LIBRARY|HUB|SHOW|VERSION|UCC|BACKTRACE|NUM_WORKERS"
    "|_PORT|_HOST|_ADDR|PROGRESS|ELASTIC|COMPILE_THREADS"
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH")


def environment_facts() -> list[Fact]:
    """Return the settings of this process; reads them and changes none."""
    facts = [_fact(each.name, each.value) for each in environment()]
    names = {fact.name for fact in facts}
    facts += [fact for fact in _further() if fact.name not in names]
    return facts


def _fact(name: str, value: Any) -> Fact:
    if isinstance(value, bool):
        value = "on" if value else "off"
    return Fact(group="environment", name=name, value=str(value))


def _further() -> Iterator[Fact]:
    yield _fact("python", platform.python_version())
    yield _fact("operating system", platform.system())
    yield _fact("threads between operators", torch.get_num_interop_threads())
    yield from _backend_flags()
    yield from _libraries()
    yield from _packages()
    yield from _variables()


def _backend_flags() -> Iterator[Fact]:
    backends: Any = torch.backends
    yield _fact("TF32 of matmul", backends.cuda.matmul.allow_tf32)
    yield _fact("TF32 of cuDNN", backends.cudnn.allow_tf32)
    yield _fact("cuDNN", backends.cudnn.enabled)
    yield _fact("cuDNN benchmark", backends.cudnn.benchmark)
    yield _fact("cuDNN deterministic", backends.cudnn.deterministic)
    matmul = backends.cuda.matmul
    fp16 = bool(matmul.allow_fp16_reduced_precision_reduction)
    bf16 = bool(matmul.allow_bf16_reduced_precision_reduction)
    yield _fact("fp16 sums in reduced precision", fp16)
    yield _fact("bf16 sums in reduced precision", bf16)
    yield _fact("flash attention", backends.cuda.flash_sdp_enabled())
    efficient = backends.cuda.mem_efficient_sdp_enabled()
    yield _fact("memory-efficient attention", efficient)
    yield _fact("fast path of transformers", backends.mha.get_fastpath_enabled())
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    yield _fact("deterministic algorithms only warn", warn_only)
    yield _fact("anomaly detection", torch.is_anomaly_enabled())


def _libraries() -> Iterator[Fact]:
    if torch.version.cuda:
        yield _fact("CUDA", torch.version.cuda)
    if getattr(torch.version, "hip", None):
        yield _fact("ROCm", torch.version.hip)
    cudnn: Any = torch.backends.cudnn
    if cudnn.is_available():
        yield _fact("cuDNN version", cudnn.version())
    built = torch.__config__.show()
    for name, pattern in _BUILT_WITH.items():
        match = re.search(pattern, built)
        if match:
            yield _fact(name, match[1])


_BUILT_WITH = {
    "oneDNN version": r"(?:MKL-DNN|oneDNN) v([0-9.]+)",
    "MKL version": r"Math Kernel Library Version ([0-9.]+)",
    "BLAS": r"BLAS_INFO=(\w+)",
}


def _packages() -> Iterator[Fact]:
    for module_name, distribution in _PACKAGES.items():
        module = sys.modules.get(module_name)
        if module is None:
            continue
        version = getattr(module, "__version__", None)
        if version is None:
            version = _installed(distribution)
        yield _fact(module_name, version or "of unknown version")
    image = sys.modules.get("PIL.Image")
    if image is not None:  # the SIMD fork resizes otherwise, under the same name
        yield _fact("PIL core", getattr(image.core, "PILLOW_VERSION", "unknown"))
    vision = sys.modules.get("torchvision")
    if vision is not None:
        yield _fact("torchvision image backend", vision.get_image_backend())


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _variables() -> Iterator[Fact]:
    for name in sorted(os.environ):
        if not _VARIABLES.fullmatch(name) or _WITHOUT_NUMBERS.search(name):
            continue
        if _SECRET.search(name):
            continue
        [shown] = without_secrets([f"{name}={os.environ[name]}"])
        yield _fact(name, shown.partition("=")[2][:200])
