"""Is the status of a job that of its script? Every rank ends with the status that is asked for."""

import sys

sys.exit(int(sys.argv[1]))
