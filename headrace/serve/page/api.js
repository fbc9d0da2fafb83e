// The HTTP API as this page uses it: keys, errors, and streams of events.

const KEY = "headrace-key";

/** An answer that is an error, or no answer. `status`: 0 where the connection failed. `retryAfter`: seconds, or null. */
export class ApiError extends Error {
  constructor(message, status, retryAfter = null) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

let key = null;
try {
  key = sessionStorage.getItem(KEY);
} catch {
  // Where storage is refused, a key lasts as long as the page.
}

// While the dialog is open, everybody who needs a key waits for the same one; who asked before it was declined does not ask again.
let asking = null;
let declined = 0;

function askForKey(why) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const input = document.getElementById("key");
    document.getElementById("key-why").textContent = why;
    const given = () => {
      if (dialog.returnValue === "use" && input.value) {
        key = input.value;
        try {
          sessionStorage.setItem(KEY, key);
        } catch {
          // See above.
        }
      }
      const used = dialog.returnValue === "use" && input.value !== "";
      input.value = "";
      asking = null;
      if (!used) declined = performance.now();
      resolve(used);
    };
    document.getElementById("key-cancel").onclick = () => dialog.close("cancel");
    dialog.returnValue = "";
    dialog.addEventListener("close", given, { once: true });
    dialog.showModal();
  });
  return asking;
}

/** The response to one request, asking for a key where one is needed. Throws ApiError, and AbortError where `signal` says so. */
export async function call(path, { body, signal } = {}) {
  const began = performance.now();
  for (;;) {
    const used = key;
    const headers = {};
    if (used !== null) headers.Authorization = `Bearer ${used}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached.", 0);
    }
    if (response.ok) return response;
    if (response.status === 401) {
      // Another request may have brought a key since this one left.
      if (key !== used) continue;
      const why = used === null
        ? "This service answers only to those who have one of its keys. It is kept until this tab is closed."
        : "The service does not know this key. Is it complete?";
      if (began > declined && (await askForKey(why))) continue;
    }
    throw await failed(response);
  }
}

async function failed(response) {
  let message = `The server answered ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // Not OpenAI's shape: something between here and the service has answered.
  }
  const seconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
  return new ApiError(message, response.status, Number.isNaN(seconds) ? null : seconds);
}

/** The data of each server-sent event. Throws ApiError where the connection breaks. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      let chunk;
      try {
        chunk = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection to the server broke.", 0);
      }
      if (chunk.done) return;
      const lines = (rest + chunk.value).split(/\r\n|\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        } else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
        // Other fields, and comments, which keep the connection open, say nothing here.
      }
    }
  } finally {
    // Whoever stops reading lets go of the connection, and with it the server of the request.
    reader.cancel().catch(() => undefined);
  }
}
