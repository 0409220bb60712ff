{
  const form = document.querySelector("form.search");
  const body = document.querySelector("#found tbody");
  const more = document.querySelector("#more");
  const count = document.querySelector("#count");
  // Not form.dataset: that is the field of this name.
  const most = Number(form.getAttribute("data-most"));
  const address = form.getAttribute("data-rows");
  const [NAME, VERSION, BACKBONE, TASK, METHODS, METRIC, SCORE, PARAMETERS, SIZE, DATE, TAGS,
    DATASETS, LANGUAGES, SIGNERS, TEXT, LOWER, CURRENT] = Array(17).keys();
  const places = { backbone: BACKBONE, task: TASK, method: METHODS, language: LANGUAGES,
    dataset: DATASETS, tag: TAGS, signer: SIGNERS };
  let shown = most;
  let strings, rows, words;

  const plain = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase()
    .match(/[\p{L}\p{N}]+/gu) ?? [];
  const all = (value) => (Array.isArray(value) ? value : [value]).map((i) => strings[i]);
  const wordsOf = (row) => ` ${plain([row[NAME], row[TEXT], ...[BACKBONE, TASK, METHODS, TAGS,
    DATASETS, LANGUAGES].flatMap((place) => all(row[place]))].join(" ")).join(" ")}`;

  const orders = {
    name: (a, b) => (rows[a][NAME] < rows[b][NAME] ? -1 : 1),
    size: (a, b) => rows[a][SIZE] - rows[b][SIZE],
    newest: (a, b) => (rows[a][DATE] > rows[b][DATE] ? -1 : 1),
    score: (a, b) => {
      const [x, y] = [rows[a], rows[b]];
      if (x[METRIC] !== y[METRIC]) {
        return x[METRIC] < 0 ? 1 : y[METRIC] < 0 ? -1 : strings[x[METRIC]] < strings[y[METRIC]] ? -1 : 1;
      }
      return (x[LOWER] ? 1 : -1) * (x[SCORE] - y[SCORE]);
    },
  };

  const find = () => {
    const chosen = new FormData(form);
    const prefixes = plain(chosen.get("q")).map((word) => ` ${word}`);
    const wanted = [];
    for (const [name, place] of Object.entries(places)) {
      if (chosen.get(name)) wanted.push([place, strings.indexOf(chosen.get(name))]);
    }
    words ??= prefixes.length ? rows.map(wordsOf) : undefined;
    const found = [];
    let last = "";
    rows.forEach((row, i) => {  // the newest version of a name first
      const key = `${row[BACKBONE]}/${row[NAME]}`;
      const fits = key !== last
        && wanted.every(([place, at]) => (Array.isArray(row[place]) ? row[place].includes(at) : row[place] === at))
        && prefixes.every((prefix) => words[i].includes(prefix));
      if (fits) {
        last = key;
        found.push(i);
      }
    });
    return found.sort(orders[chosen.get("sort")] ?? orders.newest);
  };

  const cell = (kind, text, address) => {
    const place = document.createElement(kind);
    const inner = document.createElement("bdi");
    inner.textContent = text;
    if (kind === "th") place.scope = "row";
    if (address) {
      const link = document.createElement("a");
      link.href = address;
      link.append(inner);
      place.append(link);
    } else {
      place.append(inner);
    }
    return place;
  };

  const number = (value) => (Math.abs(value) < 10 ? value.toFixed(3) : value.toFixed(2));
  const line = (row) => {
    const folder = strings[row[BACKBONE]].replaceAll("/", "--");
    const version = row[CURRENT] ? "" : `@${row[VERSION]}`;
    const score = row[METRIC] < 0 ? "-" : `${strings[row[METRIC]]} ${number(row[SCORE])}`;
    const size = row[SIZE] < 1e3 ? `${row[SIZE]} B` : row[SIZE] < 1e6 ? `${(row[SIZE] / 1e3).toFixed(0)} kB` : `${(row[SIZE] / 1e6).toFixed(2)} MB`;
    const made = document.createElement("tr");
    made.append(
      cell("th", row[NAME] + version, `adapters/${encodeURIComponent(folder)}/${row[NAME]}.html`),
      cell("td", strings[row[BACKBONE]]), cell("td", strings[row[TASK]] ?? "-"),
      cell("td", all(row[METHODS]).join(" + ") || "-"), cell("td", score),
      cell("td", row[PARAMETERS].toLocaleString("en")), cell("td", size),
      cell("td", row[DATE] || "-"), cell("td", all(row[TAGS]).join(", ")),
    );
    return made;
  };

  const show = () => {
    const found = find();
    body.replaceChildren(...found.slice(0, shown).map((i) => line(rows[i])));
    count.textContent = `${found.length.toLocaleString("en")} adapters`
      + (found.length > shown ? `, the first ${shown}` : "");
    more.parentNode.hidden = found.length <= shown;
  };
  const again = () => {
    shown = most;
    show();
  };

  globalThis.adapterhubRows = (data) => {
    ({ strings, rows } = data);
    const asked = new URLSearchParams(location.search);
    for (const [name, values] of Object.entries(data.values)) {
      const select = form.elements[name];
      if (!select) continue;  // no adapter has a value
      const known = new Set([...select.options].map((option) => option.value));
      for (const i of values) {
        if (!known.has(strings[i])) select.append(new Option(strings[i]));
      }
    }
    for (const [name, value] of asked) {
      if (form.elements[name]) form.elements[name].value = value;
    }
    form.hidden = false;
    form.addEventListener("input", again);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      again();
    });
    more.addEventListener("click", () => {
      shown += most;
      show();
    });
    if ([...asked].length) show();
  };
  if (address) {
    const script = document.createElement("script");
    script.src = address;
    document.head.append(script);
  }
}
