"""A script of examples/ with the small model of support/examples.py: `python small_example.py train_torch --steps 2`.

Ranks that the script spawns import this file too, and so have the small model.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.examples import EXAMPLES, small

if __name__ == "__main__":
    os.environ["SMALL_EXAMPLE"] = sys.argv.pop(1)
sys.path.insert(0, str(EXAMPLES))
script = small(os.environ["SMALL_EXAMPLE"])
if __name__ == "__main__":
    script.main()
