{
  const form = document.querySelector("form.ask");
  const status = form.querySelector("[role=status]");
  const known = new Map();  // what the server said of an adapter, by its name
  const places = ["first", "second"].map((id) => document.getElementById(id));
  let asking = new AbortController();

  const headers = () => {
    const token = form.elements.token?.value;
    return { "content-type": "application/json", ...(token ? { authorization: `Bearer ${token}` } : {}) };
  };
  const said = async (response) => {
    const body = await response.json().catch(() => ({}));
    const error = body.error ?? body;
    return new Error(error.message ?? (typeof error === "string" ? error : response.statusText));
  };
  const fetched = async (path, options = {}) => {
    const response = await fetch(path, { headers: headers(), ...options });
    if (!response.ok) throw await said(response);
    return response;
  };

  const list = async () => {
    const { adapters } = await (await fetched("try/adapters")).json();
    for (const each of adapters) if (each.task) known.set(each.model, each);
    document.getElementById("adapters").replaceChildren(...adapters.map((each) => new Option(each.model)));
    ["first", "second"].forEach((name, i) => {
      if (!form.elements[name].value) form.elements[name].value = adapters[i]?.model ?? "";
    });
  };
  const factsOf = async (model) => {
    if (!known.has(model)) {
      const address = `try/adapters?${new URLSearchParams({ model })}`;
      known.set(model, (await (await fetched(address)).json()).adapters[0]);
    }
    return known.get(model);
  };
  const models = () => ["first", "second"].map((name) => form.elements[name].value.trim()).filter(Boolean);
  const pairs = () => {
    const chosen = ["first", "second"].map((name) => known.get(form.elements[name].value.trim()));
    const { pair } = form.elements;
    pair.required = chosen.some((facts) => facts?.texts === 2);
    pair.parentNode.hidden = !pair.required;
  };

  // What is asked: the path and the body are those that a program would send.
  const request = (facts) => {
    const text = form.elements.text.value;
    if (facts.path !== "/v1/predict") {
      const content = facts.path.includes("chat") ? { messages: [{ role: "user", content: text }] } : { prompt: text };
      return [facts.path, { model: facts.model, ...content, max_tokens: 200, temperature: 0, stream: true }];
    }
    const given = facts.texts === 2 ? [text, form.elements.pair.value] : text;
    return [facts.path, { model: facts.model, inputs: [given] }];
  };
  const command = (path, body) => {
    const token = form.elements.token ? "    -H \"Authorization: Bearer $TOKEN\" \\\n" : "";
    const data = JSON.stringify(body).replaceAll("'", "'\\''");
    return `curl ${body.stream ? "-N " : ""}${location.origin}${path} \\\n${token}    -H 'content-type: application/json' \\\n    -d '${data}'`;
  };

  const element = (kind, text, className = "") => {
    const made = document.createElement(kind);
    made.textContent = text;
    made.className = className;
    return made;
  };
  const shares = (scores) => {
    const made = document.createElement("dl");
    for (const [label, share] of Object.entries(scores).sort((a, b) => b[1] - a[1])) {
      const value = element("dd", "");
      const bar = document.createElement("meter");
      Object.assign(bar, { min: 0, max: 1, value: share });
      bar.setAttribute("aria-label", label);
      value.append(bar, ` ${share.toFixed(3)}`);
      made.append(element("dt", label), value);
    }
    return made;
  };
  const shown = (name, value) => {
    if (name === "scores" && value && Object.values(value).every((each) => typeof each === "number")) return shares(value);
    if (Array.isArray(value) && value.length > 8 && value.every((each) => typeof each === "number")) {
      return element("p", `${name}: ${value.length} numbers, ${value.slice(0, 4).map((v) => v.toFixed(4)).join(", ")}, …`, "text");
    }
    const text = typeof value === "string" ? value : JSON.stringify(value, null, 1);
    return element("p", `${name}: ${text}`, "text");
  };
  const inputs = ["text", "texts", "text_pair", "messages", "prompt"];
  const answer = (place, prediction) => {
    const parts = Object.entries(prediction).filter(([name]) => !inputs.includes(name));
    place.replaceChildren(...parts.map(([name, value]) => shown(name, value)));
  };

  // Server-sent events: a piece of the text in each.
  const stream = async (response, write) => {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: ?/gm, "");
        if (data === "[DONE]") continue;
        const { choices = [], error } = JSON.parse(data);
        if (error) throw new Error(error.message ?? error);
        write(choices[0]?.delta?.content ?? choices[0]?.text ?? "");
      }
    }
  };

  const ask = async (place, model, signal) => {
    place.hidden = !model;
    if (!model) return;
    const [title, note, output, line] = ["h2 bdi", ".note", ".answer", "pre bdi"].map((each) => place.querySelector(each));
    title.textContent = model;
    note.textContent = "asked …";
    line.textContent = "";
    output.replaceChildren();
    try {
      const [path, body] = request(await factsOf(model));
      line.textContent = command(path, body);
      const start = performance.now();
      const response = await fetched(path.slice(1), { method: "POST", body: JSON.stringify(body), signal });
      title.textContent = response.headers.get("x-adapter-version") ?? model;
      const digest = response.headers.get("x-adapter-digest");
      let first = 0;
      if (body.stream) {
        const text = element("p", "", "text");
        output.replaceChildren(text);
        await stream(response, (piece) => {
          first ||= piece ? performance.now() - start : 0;
          text.append(piece);
        });
      } else {
        answer(output, (await response.json()).predictions[0]);
      }
      const whole = performance.now() - start;
      note.textContent = `${whole.toFixed(0)} ms${first ? `, the first words after ${first.toFixed(0)} ms` : ""}`
        + (digest ? `; digest ${digest.slice(0, 12)}` : "; no adapter");
    } catch (error) {
      if (error.name === "AbortError") return;
      note.textContent = "not answered";
      output.replaceChildren(element("p", error.message, "text wrong"));
    }
  };

  const guarded = (work) => async (event) => {
    event?.preventDefault();
    status.textContent = "";
    try {
      await work();
    } catch (error) {
      status.textContent = error.message.split("\n")[0];
    }
  };
  const choose = guarded(async () => {
    await Promise.all(models().map(factsOf));
    pairs();
  });
  form.elements.first.addEventListener("change", choose);
  form.elements.second.addEventListener("change", choose);
  form.elements.token?.addEventListener("change", guarded(list));
  form.addEventListener("submit", guarded(async () => {
    asking.abort();
    asking = new AbortController();
    await Promise.allSettled(models().map(factsOf));
    pairs();
    if (!form.reportValidity()) return;
    document.querySelector(".answers").hidden = false;
    await Promise.all(places.map((place) => ask(place, form.elements[place.id].value.trim(), asking.signal)));
  }));
  if (!form.elements.token) guarded(async () => {
    await list();
    await choose();
  })();
}
