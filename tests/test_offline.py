"""The test run, its children and its kernels reach no address outside loopback."""

import socket
import subprocess
import sys

import pytest


def send_a_datagram(host):
    with socket.socket(type=socket.SOCK_DGRAM) as sender:
        sender.sendto(b"x", (host, 53))


@pytest.mark.parametrize(
    "call",
    [
        lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
        lambda: socket.getaddrinfo("example.org", 80),
        lambda: socket.getaddrinfo("127.0.0.1.example.org", 80),
        lambda: socket.gethostbyname("example.org"),
        lambda: socket.gethostbyaddr("192.0.2.1"),
        lambda: send_a_datagram("192.0.2.1"),
    ],
)
def test_a_socket_to_the_outside_raises(call):
    with pytest.raises(RuntimeError, match="must not touch the network"):
        call()


def test_a_child_process_is_held_to_it_too():
    code = "import socket; socket.create_connection(('192.0.2.1', 80), timeout=1)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1 and "must not touch the network" in run.stderr


def test_loopback_works():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            client.sendall(b"x")
        server.accept()[0].close()
