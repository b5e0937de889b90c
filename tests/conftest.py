"Threads that wait do not spin: on a busy machine that costs more than the work."
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
