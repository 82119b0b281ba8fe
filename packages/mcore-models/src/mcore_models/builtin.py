"""Built-in plugins of mcore-models, registered through the same hooks as anybody's. No torch."""

from mcore_models.specs import KernelSpec, ModelSpec
from mcore_models.zoo.gpt2 import GPT
from mcore_models.zoo.llama import LLAMA
from mcore_parallel.plugins import hookimpl, lazy


@hookimpl
def mcore_kernels() -> list[KernelSpec]:
    """The kernel set made of plain torch operations, for CPU and CUDA."""
    return [KernelSpec("local", lazy("mcore_models.kernels:torch_kernels"), "plain torch operations, CPU and CUDA")]


@hookimpl
def mcore_models() -> list[ModelSpec]:
    """The GPT-2 and Llama families."""
    return [GPT, LLAMA]
