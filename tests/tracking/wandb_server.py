"""A W&B server in memory, for the real client: GraphQL and file stream as wandb 0.31 asks for them (found by watching it)."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """Holds runs as ``{id: {"history": [...], "summary": {}, "config": {}, "state": ..., "sessions": n}}``.

    ``answering.clear()`` makes every request wait, as a server does that is up but stuck; ``started`` says that a run
    has been opened.
    """

    def __init__(self):
        self.runs: dict[str, dict[str, Any]] = {}
        self.answering = threading.Event()
        self.answering.set()
        self.started = threading.Event()
        self.lock = threading.Lock()
        handler = type("Handler", (RequestHandler,), {"owner": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.answering.set()
        self.http.shutdown()
        self.http.server_close()

    def run(self, name: str) -> dict[str, Any]:
        fresh = {"history": [], "summary": {}, "config": {}, "state": None, "sessions": 0, "artifacts": []}
        return self.runs.setdefault(name, fresh)

    def bucket(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.run(name)
        project = {"id": "project", "name": variables.get("project") or "p", "entity": {"id": "entity", "name": "team"}}
        bucket = {"id": f"run-{name}", "name": name, "displayName": run.get("displayName") or name, "description": None}
        bucket |= {"config": json.dumps(run["config"]), "sweepName": None, "project": project, "tags": [], "notes": None}
        return bucket | {"historyLineCount": len(run["history"])}

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "Viewer":
            viewer = {"id": "user", "entity": "team", "username": "ci", "email": "", "flags": "{}", "teams": {"edges": []}}
            return {"viewer": viewer}
        if operation == "RunResumeStatus":
            name = variables["name"]
            bucket = self.bucket(name, variables) if self.runs.get(name, {}).get("sessions") else None
            if bucket:
                run = self.runs[name]
                tail = json.dumps([json.dumps(row) for row in run["history"][-1:]])
                bucket |= {"summaryMetrics": json.dumps(run["summary"]), "logLineCount": 0, "eventsLineCount": 0}
                bucket |= {"historyTail": tail, "eventsTail": "[]", "wandbConfig": json.dumps({"t": 1})}
            return {"model": {"id": "project", "name": "p", "entity": {"id": "entity", "name": "team"}, "bucket": bucket}}
        if operation == "UpsertBucket":
            run = self.run(variables["name"])
            run["sessions"] += 1
            self.started.set()
            run |= {key: variables[key] for key in ("displayName", "groupName", "state") if variables.get(key)}
            run["config"] |= json.loads(variables.get("config") or "{}")
            run["summary"] |= json.loads(variables.get("summaryMetrics") or "{}")
            return {"upsertBucket": {"bucket": self.bucket(variables["name"], variables), "inserted": run["sessions"] == 1}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/put/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": f"run-{variables['run']}", "uploadHeaders": [], "files": files}}
        if operation == "CreateArtifact":
            self.run(variables["input"]["runName"])["artifacts"].append(variables["input"]["artifactCollectionName"])
            artifact = {"id": "artifact", "state": "COMMITTED", "artifactSequence": {"latestArtifact": {"id": "artifact"}}}
            return {"createArtifact": {"artifact": artifact}}
        return {"project": {"artifact": None}}  # the type of an artifact, asked for without an operation's name

    def stream(self, name: str, body: dict[str, Any]) -> None:
        run = self.run(name)
        for file, content in (body.get("files") or {}).items():
            if file == "wandb-history.jsonl":
                run["history"][content["offset"] :] = map(json.loads, content["content"])
            elif file == "wandb-summary.json":
                run["summary"] = json.loads(content["content"][-1])
        if body.get("complete"):
            run |= {"state": "finished", "exit_code": body.get("exitcode")}


class RequestHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: WandbServer

    def log_message(self, *args: Any) -> None:
        """Silent: pytest shows what fails."""

    def body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client that was killed
            super().handle()

    def answer(self) -> None:
        body = self.body()
        self.owner.answering.wait()
        result: dict[str, Any] = {}
        with self.owner.lock:
            if self.path == "/graphql":
                request = json.loads(body)
                result = {"data": self.owner.graphql(request.get("operationName"), request.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                self.owner.stream(self.path.split("/")[-2], json.loads(body))
        data = json.dumps(result).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = answer
