"""[2] The only door to vLLM: its engine in one process, or spread over the processes of a mesh.

Importing the modules of this package takes seconds, so the Generator imports them in `setup`.
"""

import logging
import os
import warnings

# vLLM sets its own log level only after it has told what it misses on this machine.
logging.getLogger("vllm").setLevel(os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"))
warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
