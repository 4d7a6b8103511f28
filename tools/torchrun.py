"""torchrun that ends with the exit code of the run; ``tools/dist_train.sh`` starts it.

torchrun itself ends with 1 however its processes end. This passes on 75 where they saved a
checkpoint on SIGTERM, 130 after Ctrl-C and 2 where they refused the config; a SIGTERM that left no
checkpoint is 143. All else is as with torchrun.
"""

import os
import signal
import sys
import tempfile

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

STOPPED, INTERRUPTED, BAD_INPUT = 75, 130, 2


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        # A process leaves it when it ends with 75: torchrun does not say how those ended that it
        # passed a signal to.
        mark = os.environ["XLENGTH_STOP_MARK"] = os.path.join(folder, "stopped")
        try:
            run.main()
        except ChildFailedError as error:
            codes = {failure.exitcode for failure in error.failures.values()}
            for code in (STOPPED, INTERRUPTED, BAD_INPUT):
                if code in codes:
                    return code
            raise
        except SignalException as error:
            if error.sigval == signal.SIGTERM and os.path.exists(mark):
                return STOPPED
            return 128 + int(error.sigval)
        except KeyboardInterrupt:
            return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
