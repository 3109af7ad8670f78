"""``kvchat`` with a controlling terminal, as users have: others report no change of size."""

import fcntl
import runpy
import termios

if __name__ == "__main__":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    runpy.run_module("kvchat", run_name="__main__", alter_sys=True)
