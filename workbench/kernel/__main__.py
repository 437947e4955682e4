"""`python -m workbench.kernel`: what the kernelspecs of the ranks start."""

from workbench.kernel.app import main

if __name__ == "__main__":
    main()
