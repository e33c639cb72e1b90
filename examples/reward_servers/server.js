// A reward server: 1 where the completion holds the row's answer. node server.js [PORT]
const http = require("node:http");

function score({ completion, answer }) {
  if (answer === undefined) return null; // abstains
  return completion.includes(answer) ? 1 : 0;
}

const server = http.createServer(async (request, response) => {
  try {
    const parts = [];
    for await (const part of request) parts.push(part);
    const { samples } = JSON.parse(Buffer.concat(parts));
    response.setHeader("Content-Type", "application/json");
    response.end(JSON.stringify({ scores: samples.map(score) }));
  } catch (error) {
    response.writeHead(400).end(String(error));
  }
});
server.listen(Number(process.argv[2] ?? 5556), "127.0.0.1", () => console.log(server.address().port));
