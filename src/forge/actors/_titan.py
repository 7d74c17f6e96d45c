"""The only door to torchtitan: chooses its device before its modules read it, then names what forge uses.

Importing this module takes seconds, so actors import it in `setup`, never at module level.
"""

import torch
import torchtitan.tools.utils

# Without an accelerator torchtitan falls back to "cuda", and every module of it copies that value.
if not torch.cuda.is_available():
    torchtitan.tools.utils.device_type = "cpu"
    torchtitan.tools.utils.device_module = torch.cpu

from torchtitan.components.checkpoint import MODEL, AsyncMode, CheckpointManager
from torchtitan.components.lora import LoRAConverter
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.config import (
    TORCH_DTYPE_MAP,
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.utils import (
    clip_grad_norm_,
    get_spmd_context,
    init_distributed,
    set_determinism,
    set_spmd_backend,
)
from torchtitan.models.common import CosSinRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, GQAttention, QKVLinear
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.llama3 import llama3_configs
from torchtitan.models.qwen3 import Qwen3StateDictAdapter, parallelize_qwen3, qwen3_configs
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.utils import get_local_device, set_default_dtype

__all__ = [
    "MODEL",
    "TORCH_DTYPE_MAP",
    "AsyncMode",
    "CheckpointManager",
    "CommConfig",
    "CompileConfig",
    "CosSinRoPE",
    "DebugConfig",
    "Embedding",
    "FlexAttention",
    "FullAC",
    "GQAttention",
    "LRSchedulersContainer",
    "Linear",
    "LoRAConverter",
    "ModelSpec",
    "OptimizersContainer",
    "ParallelDims",
    "ParallelismConfig",
    "ParamGroupConfig",
    "QKVLinear",
    "Qwen3Model",
    "Qwen3StateDictAdapter",
    "Qwen3TransformerBlock",
    "RMSNorm",
    "SelectiveAC",
    "TrainingConfig",
    "clip_grad_norm_",
    "get_local_device",
    "get_spmd_context",
    "init_distributed",
    "llama3_configs",
    "make_ffn_config",
    "parallelize_qwen3",
    "pipeline_llm",
    "qwen3_configs",
    "set_default_dtype",
    "set_determinism",
    "set_spmd_backend",
    "skip_param_init",
]
