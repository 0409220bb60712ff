for (const section of document.querySelectorAll("section.picked")) {
  const most = 6;
  const boxes = [...section.querySelectorAll("fieldset input")];
  const named = boxes.find((box) => `#${box.parentNode.textContent.trim()}` === decodeURIComponent(location.hash));
  if (named) {
    boxes.filter((box) => box !== named).forEach((box, i) => { box.checked = i < 3; });
    named.checked = true;
  }
  const limit = () => {
    const full = boxes.filter((box) => box.checked).length >= most;
    boxes.forEach((box) => { box.disabled = full && !box.checked; });
  };
  section.addEventListener("input", limit);
  limit();
}
