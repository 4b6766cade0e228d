"""`kubectl port-forward`: passes connections on to the server of a pod until it is ended.

Several accounts on one machine would want the same port, so a reader's ports are all one port of this machine, which
`.curlrc` names to curl.
"""

import asyncio
import sys


async def forward(mine: str, there: str, here: str, port: str) -> None:
    """Print what kubectl prints, and serve `port` from `here`."""
    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, onward = await asyncio.open_connection("127.0.0.1", int(here))
        await asyncio.gather(pump(reader, onward), pump(back, writer), return_exceptions=True)

    server = await asyncio.start_server(connect, "127.0.0.1", int(port))
    sys.stdout.write(f"Forwarding from 127.0.0.1:{mine} -> {there}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(forward(*sys.argv[1:]))
