import { render } from "preact";
import { Lesson } from "./lesson-page";
import "./style.css";
import "./lesson.css";

const place = document.getElementById("app");
if (place) render(<Lesson />, place);
