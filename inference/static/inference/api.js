// How the Workbench talks to the API: through the App's own doors, by the session, streamed or whole.

const page = document.getElementById("workbench");
const token = page.querySelector("[name=csrfmiddlewaretoken]").value;

// An answer that is an error: the API's message, code and param, or what can be said of another answer.
export class ApiFault extends Error {
  constructor(message, { code = null, param = null } = {}) {
    super(message);
    this.code = code;
    this.param = param;
  }
}

async function faultOf(response) {
  try {
    const { error } = await response.json();
    return new ApiFault(error.message, error);
  } catch {
    const hint = response.status === 403 ? "Reload the page: it was open for too long." : "Try again.";
    return new ApiFault(`The server answered ${response.status}. ${hint}`);
  }
}

async function ask(body, signal) {
  let response;
  try {
    response = await fetch(page.dataset.completions, {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRFToken": token },
      body: JSON.stringify(body),
      signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFault("The server could not be reached.");
  }
  if (!response.ok) throw await faultOf(response);
  return response;
}

export async function models() {
  const response = await fetch(page.dataset.models);
  if (!response.ok) throw await faultOf(response);
  return (await response.json()).data;
}

export async function complete(body, signal) {
  return (await ask(body, signal)).json();
}

// Yields the chunks of a stream. Throws ApiFault where an error arrives in it or it breaks off; aborting `signal`
// closes the connection, which stops the request in the engine.
export async function* stream(body, signal) {
  const response = await ask({ ...body, stream: true, stream_options: { include_usage: true } }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ApiFault("The answer broke off.");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const data = frame.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiFault(chunk.error.message, chunk.error);
      yield chunk;
    }
  }
}
