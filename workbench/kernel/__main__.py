"""`python -m workbench.kernel`: the process that the kernelspecs start."""

from workbench.kernel.app import main

if __name__ == "__main__":
    main()
