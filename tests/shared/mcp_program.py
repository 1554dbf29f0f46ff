"""An MCP server on standard streams that speaks just enough of the protocol.

It starts ten times as fast as one that is made with the package ``mcp``.
"""

import json
import os
import signal
import sys
import threading

TOOLS = ("process", "nap", "freeze", "repeat", "note")
_writing = threading.Lock()


def _send(request, answer):
    with _writing:
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], **answer}), flush=True)


def _call(request):
    name, text = request["params"]["name"], request["params"]["arguments"]["text"]
    result = ""
    match name:
        case "process":
            result = str(os.getpid())
        case "nap":
            threading.Event().wait(float(text))
            result = "rested"
        case "freeze":
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "repeat":
            while text == "for ever":
                sys.stdout.write("x" * 65536)
            result = "x" * int(text)
        case "note":
            result = ", ".join([os.environ["PRIVATE_NOTE"], os.environ["HOME"], text])
    _send(request, {"result": {"content": [{"type": "text", "text": result}]}})


def protocol_answer(request):
    """The answer to a request that is no call."""
    match request["method"]:
        case "initialize":
            about = {"capabilities": {"tools": {}}, "serverInfo": {"name": "plain", "version": "1"}}
            return {"result": {"protocolVersion": "2025-06-18"} | about}
        case "tools/list":
            return {
                "result": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in TOOLS]}
            }
    return {"error": {"code": -32601, "message": "Method not found"}}


def main():
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("method") == "tools/call":
            threading.Thread(target=_call, args=(request,), daemon=True).start()
        elif "id" in request:
            _send(request, protocol_answer(request))


if __name__ == "__main__":
    main()
