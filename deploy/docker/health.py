"""Exit with 0 where the service of this container says at /health that it is well."""

import http.client
import os

port = os.environ["STRETTO_METRICS"].rpartition(":")[2]
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
connection.request("GET", "/health")
answer = connection.getresponse()
print(answer.read().decode(), end="")
raise SystemExit(answer.status != 200)
