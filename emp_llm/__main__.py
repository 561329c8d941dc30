"""`python -m emp_llm COMMAND` is `emp-llm COMMAND`."""

from emp_llm.cli import main

if __name__ == "__main__":
    main()
