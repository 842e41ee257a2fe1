package plugin

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"sync"
)

// plainLines stands between a plugin's standard error and go-plugin, which takes any JSON object for a
// line of hclog and panics when "@message", "@level" or "@timestamp" of it is not text. Such lines
// pass with a mark before them, which makes them plain text. Long lines are cut.
type plainLines struct {
	io.Closer
	in  *bufio.Reader
	out bytes.Buffer // lines that go-plugin has not read yet
	err error

	mu   sync.Mutex
	last string // line that says most
	tail []string
}

func newPlainLines(r io.ReadCloser) *plainLines {
	return &plainLines{Closer: r, in: bufio.NewReaderSize(r, 2*logLine)}
}

// Read implements io.Reader.
func (p *plainLines) Read(b []byte) (int, error) {
	for p.out.Len() == 0 {
		if p.err != nil {
			return 0, p.err
		}
		p.fill()
	}
	return p.out.Read(b)
}

// fill reads one line.
func (p *plainLines) fill() {
	line, err := p.in.ReadSlice('\n')
	if len(line) > 0 {
		line = bytes.TrimRight(line, "\r\n")
		p.note(string(line))
		if !harmless(line) {
			p.out.WriteString("plugin: ") // after which no line is JSON
		}
		p.out.Write(line)
		p.out.WriteByte('\n')
	}
	for errors.Is(err, bufio.ErrBufferFull) { // the rest of the line
		_, err = p.in.ReadSlice('\n')
	}
	p.err = err
}

// harmless reports whether go-plugin can read a line.
func harmless(line []byte) bool {
	if b := bytes.TrimLeft(line, " \t\r"); len(b) == 0 || b[0] != '{' {
		return true
	}
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil {
		return true // no JSON for go-plugin either
	}
	for _, key := range []string{"@message", "@level", "@timestamp"} {
		if value, present := object[key]; present && !bytes.HasPrefix(value, []byte{'"'}) {
			return false
		}
	}
	return true
}
