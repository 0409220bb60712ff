for (const block of document.querySelectorAll("pre.copied")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${block.dataset.name}`);
  block.before(button);
  const status = document.createElement("span");
  status.setAttribute("role", "status");
  status.className = "note";
  button.after(status);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(block.textContent);
      status.textContent = " copied";
    } catch {
      getSelection().selectAllChildren(block);
      status.textContent = " selected: copy it with the browser";
    }
  });
}
