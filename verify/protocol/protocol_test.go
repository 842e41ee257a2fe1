package protocol

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/kvport/kvport/verify/testkit"
)

var update = flag.Bool("update", false, "write bytes and files of the transcripts again, from the messages and the Go example")

// transcripts are the names of all transcripts.
func transcripts() []string { return []string{"store", "cancel", "broken", "first", "newer"} }

func pathOf(name string) string { return filepath.Join("testdata", name+".jsonl") }

func transcript(t *testing.T, name string) []Line {
	t.Helper()
	lines, err := Read(pathOf(name))
	require.NoError(t, err)
	require.NotEmpty(t, lines)
	return lines
}

// plugins are programs in three languages, by the folder of their example. Those that this machine cannot run are left out.
func plugins(t *testing.T) map[string]string {
	t.Helper()
	examples := filepath.Join(testkit.Root(t), "examples")
	programs := map[string]string{"minimal": filepath.Join(t.TempDir(), "kvport-minimal")}
	out, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", programs["minimal"], filepath.Join(examples, "minimal")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	if _, err := os.Stat(filepath.Join(examples, "..", ".deps", "venv", "bin", "python")); err != nil {
		t.Logf("THE EXAMPLE IN PYTHON IS NOT TESTED: run make deps: %v", err)
	} else {
		programs["python"] = filepath.Join(examples, "python", "kvport-pystore")
	}
	programs["nodejs"] = filepath.Join(examples, "nodejs", "kvport-nodestore")
	if err := testkit.Starts(t, programs["nodejs"]); err != nil {
		t.Logf("THE EXAMPLE FOR NODE.JS IS NOT TESTED: %v", err)
		delete(programs, "nodejs")
	}
	return programs
}

// descriptors reads a descriptor set.
func descriptors(t *testing.T, path string) *protoregistry.Files {
	t.Helper()
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	var set descriptorpb.FileDescriptorSet
	require.NoError(t, proto.Unmarshal(data, &set))
	files, err := protodesc.NewFiles(&set)
	require.NoError(t, err)
	return files
}

// first is the first version of protocol 1, long before it was frozen.
func first(t *testing.T) *protoregistry.Files {
	t.Helper()
	return descriptors(t, filepath.Join("testdata", "first.binpb"))
}

// frozen is protocol 1.0.
func frozen(t *testing.T) *protoregistry.Files {
	t.Helper()
	return descriptors(t, filepath.Join(testkit.Root(t), "proto", "kvport", "v1", "v1.0.binpb"))
}

// play plays a transcript to a program with a fresh folder, as the host of that transcript.
func play(t *testing.T, program, name string) error {
	t.Helper()
	return playFor(t, program, name, 0)
}

// playFor is play with a time for which streams are watched before they end.
func playFor(t *testing.T, program, name string, settling time.Duration) error {
	t.Helper()
	p := &Player{Program: program, Frozen: frozen(t), Settling: settling}
	if name == "first" {
		p.Known = first(t)
	}
	return p.Replay(t.Context(), transcript(t, name), t.TempDir())
}

// sums are the SHA-256 of the transcripts, so that -update cannot change what they say unseen.
func sums() map[string]string {
	return map[string]string{
		"broken": "d24c7f5aef77da141b896ef498b0720a2d2d93778c135270178318bd3fefbdea",
		"cancel": "dcf3d556c92cf6c947c94765e749cd802d72244f500e4a0c3555fd6c24ced29f",
		"first":  "da2ac7e4ab8191f27b44e85fb1fa68d9b87bb186b0f3e014d65c7caa9ead5942",
		"newer":  "8d09477b6a9867334c48a396d101197a611c719ccce203aa7781273e246e7b43",
		"store":  "2574ee19207bae3c0fcdac705f3088fad940cb06e6c590e2ee6e9257e7207667",
	}
}

// TestBytes: each message is sent as the bytes that were recorded when protocol 1 was frozen.
func TestBytes(t *testing.T) {
	for _, name := range transcripts() {
		lines, messages := transcript(t, name), 0
		for i := range lines {
			l := &lines[i]
			if l.Message == nil {
				continue
			}
			messages++
			data, err := l.Encoded()
			require.NoError(t, err, "%s:%d", name, i+1)
			if *update {
				l.Bytes = data
			}
			require.Equal(t, data, append([]byte{}, l.Bytes...), "%s:%d", name, i+1)
		}
		require.Greater(t, messages, 20, name)
		file, err := os.ReadFile(pathOf(name))
		require.NoError(t, err)
		require.Equal(t, sums()[name], fmt.Sprintf("%x", sha256.Sum256(file)), "%s was changed: protocol 1.0 is frozen", name)
		if *update {
			require.NoError(t, Write(pathOf(name), lines))
		}
	}
}

// TestFirstHost: the transcript of the first host has only what the first version of protocol 1 had.
func TestFirstHost(t *testing.T) {
	files := first(t)
	for i, l := range transcript(t, "first") {
		for _, at := range []string{l.Host, l.Plugin} {
			if at == "" || l.Message == nil {
				continue
			}
			kind := methodOf(at).request
			if l.Plugin != "" {
				kind = methodOf(at).response
			}
			require.NoError(t, Known(files, kind.ProtoReflect().Descriptor().FullName(), l.Bytes), "line %d", i+1)
		}
	}
	later := transcript(t, "store")
	for i := range later {
		if strings.Contains(string(later[i].Message), "linkKey") {
			require.ErrorIs(t, Known(files, protoreflect.FullName("kvport.v1.SessionRequest"), later[i].Bytes), ErrDiffers)
		}
	}
}

// TestTranscripts: plugins in Go, Python and JavaScript answer the host of each transcript as it allows.
func TestTranscripts(t *testing.T) {
	for language, program := range plugins(t) {
		for _, name := range transcripts() {
			t.Run(language+"/"+name, func(t *testing.T) {
				if *update && language == "minimal" {
					recordFiles(t, name, program)
				}
				require.NoError(t, play(t, program, name))
			})
		}
	}
}

// recordFiles writes into a transcript what the Go example stores.
func recordFiles(t *testing.T, name, program string) {
	t.Helper()
	lines, dir := transcript(t, name), t.TempDir()
	for i := range lines {
		if lines[i].Files == nil {
			continue
		}
		p := &Player{Program: program, Frozen: frozen(t)}
		require.NoError(t, p.Replay(t.Context(), lines[:i], dir))
		files, err := Stored(dir)
		require.NoError(t, err)
		lines[i].Files = files
		require.NoError(t, Write(pathOf(name), lines))
	}
}

// TestWrongPlugins: each mistake in the example for Node.js is noticed by a transcript.
func TestWrongPlugins(t *testing.T) {
	right := filepath.Join(testkit.Root(t), "examples", "nodejs")
	if err := testkit.Starts(t, filepath.Join(right, "kvport-nodestore")); err != nil {
		t.Skipf("WRONG PLUGINS ARE NOT TESTED: %v", err)
	}
	for name, m := range map[string]struct{ file, from, to, transcript string }{
		"refuses newer fields":  {"protobuf.mjs", "continue; // a newer host", `throw new Malformed("unknown");`, "newer"},
		"answers an old kind":   {"session.mjs", "!kind || ", "", "newer"},
		"another code":          {"store.mjs", `"GONE", ` + "`${name} is not", `"BUSY", ` + "`${name} is not", "store"},
		"names no block":        {"store.mjs", "failed.push(block);", "", "store"},
		"stores partial blocks": {"store.mjs", "if (!isPartial(key)) await", "await", "store"},
		"writes elsewhere":      {"store.mjs", "offset + block * stride);", "offset + (block ^ 1) * stride);", "cancel"},
		"other keys":            {"store.mjs", "kvport/store/1", "kvport/store/2", "first"},
		"answers no Cancel":     {"session.mjs", "return;\n    }\n    const kind", "this.answer(request.id, { moved: {} });\n      return;\n    }\n    const kind", "cancel"},
		"answers twice":         {"session.mjs", "    this.answer(request.id, answer);\n  }", "    this.answer(request.id, answer);\n    if (request.id == 9) this.answer(request.id, answer);\n  }", "cancel"},
		"answers Close twice":   {"session.mjs", "if (close) this", "if (close) this.answer(close.id, { closed: {} });\n    if (close) this", "store"},
		"opens anything":        {"store.mjs", "  checkOpen(opened);\n", "", "broken"},
		"two opens":             {"session.mjs", `|| (kind === "open") === Boolean(this.opening)`, "", "broken"},
		"other protocol":        {"handshake.mjs", "`1|${PROTOCOL}|unix", "`1|2|unix", "store"},
		"ends as if it failed":  {"handshake.mjs", "process.exit(0)", "process.exit(3)", "cancel"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			require.NoError(t, os.CopyFS(dir, os.DirFS(right)))
			path := filepath.Join(dir, m.file)
			code, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Contains(t, string(code), m.from)
			require.NoError(t, os.WriteFile(path, []byte(strings.Replace(string(code), m.from, m.to, 1)), 0o600))
			twice, settling := name == "answers Close twice", time.Duration(0)
			if twice { // the second answer, or the end of the stream, ends the watch, however late a busy machine lets it come
				settling = patience
			}
			err = playFor(t, filepath.Join(dir, "kvport-nodestore"), m.transcript, settling)
			require.ErrorIs(t, err, ErrDiffers)
			if twice { // nothing is awaited any more, so that only this finds it
				require.ErrorContains(t, err, "surplus answer")
			}
			t.Log(err)
		})
	}
}
