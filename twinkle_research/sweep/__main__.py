import sys

from twinkle_research.sweep.command import main

if __name__ == "__main__":
    sys.exit(main())
