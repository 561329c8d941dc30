"""`python -m emp_llm.calibrate` is `emp-llm calibrate`.

`emp_llm.calibrate` is the function, also after `import emp_llm.calibrate`. So it is in
`from emp_llm.calibrate import calibrate`.
"""

import sys

from emp_llm.cli import main
from emp_llm.commands.calibrate import calibrate

if __name__ == "__main__":
    main(["calibrate", *sys.argv[1:]])
else:  # the package gets as its attribute what stands here
    calibrate.calibrate = calibrate  # type: ignore[attr-defined]
    sys.modules[__name__] = calibrate  # type: ignore[assignment]
