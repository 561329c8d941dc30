"""`python -m emp_llm.prune` is `emp-llm prune`.

`emp_llm.prune` is the function, also after `import emp_llm.prune`. So it is in
`from emp_llm.prune import prune`.
"""

import sys

from emp_llm.cli import main
from emp_llm.commands.prune import prune

if __name__ == "__main__":
    main(["prune", *sys.argv[1:]])
else:  # the package gets as its attribute what stands here
    prune.prune = prune  # type: ignore[attr-defined]
    sys.modules[__name__] = prune  # type: ignore[assignment]
