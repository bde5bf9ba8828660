"""The real controller process, with fake replicas: `run_controller.py PARENT_PID [--once] [--ephemeral]`."""

import logging
import sys
from pathlib import Path

from narrowgauge.serving.rollout.daemon import ControllerOptions, run_controller
from narrowgauge.serving.settings import read_settings

if __name__ == "__main__":
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname)s %(message)s")
    options = ControllerOptions(
        once="--once" in sys.argv,
        ephemeral="--ephemeral" in sys.argv,
        die_with=int(sys.argv[1]),
        command=(sys.executable, str(Path(__file__).with_name("fake_replica.py"))),
        tick_s=0.1,
    )
    run_controller(read_settings(), options)
