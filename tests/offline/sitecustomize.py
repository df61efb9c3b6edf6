"""Python loads this at start-up where its folder is on PYTHONPATH: no sockets but loopback.

conftest.py puts it there, so the test process's children, kernels among them, are held to it too.
"""

import ipaddress
import sys


def _is_here(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def refuse_outside(event: str, arguments: tuple) -> None:
    """An audit hook that raises on a connection or name look-up outside loopback."""
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        host = address[0] if isinstance(address, tuple) else None  # None: a Unix socket
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host and not _is_here(host):
        raise RuntimeError(f"the course must not touch the network: {event} to {host}")


sys.addaudithook(refuse_outside)
