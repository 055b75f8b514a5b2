// Browsers break a line inside a flag such as --env-id. Short code stays on one line.
for (const code of document.querySelectorAll("p > code, li > code, td > code"))
  if (code.textContent.length < 30) code.style.whiteSpace = "nowrap";
