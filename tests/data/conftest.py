"""Settings of the tests of data workers."""

from torch.utils.data import _utils

# torch waits so long, twice, for each worker of an iterator that is collected; 5 s by default
_utils.MP_STATUS_CHECK_INTERVAL = 0.5
