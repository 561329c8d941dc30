"""`python -m emp_llm.evaluate` is `emp-llm evaluate`.

`emp_llm.evaluate` is the function, also after `import emp_llm.evaluate`. So it is in
`from emp_llm.evaluate import evaluate`.
"""

import sys

from emp_llm.cli import main
from emp_llm.commands.evaluate import evaluate

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
else:  # the package gets as its attribute what stands here
    evaluate.evaluate = evaluate  # type: ignore[attr-defined]
    sys.modules[__name__] = evaluate  # type: ignore[assignment]
