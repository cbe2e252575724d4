"""`python -m lserve_tools` is the command `lserve-tools`."""

from lserve_tools.cli.main import main

main()
