"""Agentic runs with slow environments on the wall clock, beside the simulator's prediction. Parts: `agentic/`.

python benchmarks/agentic.py                                    # four runs of at most a minute, and the episodes
python benchmarks/agentic.py --parts pace --mean-s 0.3 --std-s 0.1
python benchmarks/agentic.py --parts pace --hang 0.003          # one step in 300 never returns
python benchmarks/agentic.py --parts episodes                   # 1,000 at once, 10,000 in all
python benchmarks/agentic.py --quick                            # does it run at all?
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.agentic.__main__ import main  # the package beside this file

if __name__ == "__main__":
    main()
