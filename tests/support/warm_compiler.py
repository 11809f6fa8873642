"""Import torch's compiler and use it once, so that forks of this process need not: see ``ForkedRuns.with_imports``."""

import torch
import torch._inductor.compile_fx  # and all that it imports
from torch import nn

from tests.support.compiler_backend import NO_CODE

_layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
torch.compile(_layer, backend=NO_CODE)(torch.ones(1, 3, 8))
torch.compiler.reset()
