package sdk

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/go-plugin"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"

	"github.com/kvport/kvport/connector"
	"github.com/kvport/kvport/internal/shm"
	"github.com/kvport/kvport/internal/wire"
	kvportv1 "github.com/kvport/kvport/proto/kvport/v1"
	"github.com/kvport/kvport/verify/testkit"
)

// pluginCommand runs the test binary as a plugin process.
func pluginCommand(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = []string{asPlugin + "=1"}
	return cmd
}

func TestByHand(t *testing.T) {
	for _, c := range []struct {
		args     []string
		code     int
		out, err string
	}{
		{nil, 2, "", "--kv-transfer-config"},
		{[]string{"--version"}, 0, "Served 1.2.3 (protocol 1)\n", ""},
		{[]string{"-h"}, 0, "--manifest [--config JSON]", ""},
		{[]string{"--manifest"}, 0, `"scope": "shared"`, ""},
		{[]string{"--manifest", "--config", `{"size": 9}`}, 0, `"name": "Served"`, ""},
		{[]string{"--manifest", "--config", `{"sise": 9}`}, 2, "", `did you mean "size"?`},
		{[]string{"--manifest", "--config", `{`}, 2, "", "unexpected end"},
		{[]string{"--config", "{}"}, 2, "", "--manifest"},
		{[]string{"--nonsense"}, 2, "", "--nonsense"[1:]},
		{[]string{"extra"}, 2, "", "extra"},
	} {
		var out, errs bytes.Buffer
		code := runByHand(servedPlugin(), append([]string{"/bin/kvport-served"}, c.args...), &out, &errs)
		require.Equal(t, c.code, code, c.args)
		require.Contains(t, out.String(), c.out, c.args)
		require.Contains(t, errs.String(), c.err, c.args)
		require.Equal(t, c.code == 0, out.Len() > 0, "%v: output goes where it belongs", c.args)
		require.Equal(t, c.code != 0, errs.Len() > 0, c.args)
	}
	var errs bytes.Buffer
	runByHand(servedPlugin(), []string{"kvport-served"}, io.Discard, &errs)
	for _, want := range []string{"kvport-served", "Served", "1.2.3", `"kv_connector": "Served"`, "--manifest"} {
		require.Contains(t, errs.String(), want)
	}
}

func TestByHandWithBrokenDescribe(t *testing.T) {
	p := servedPlugin()
	p.Describe = nil
	var out, errs bytes.Buffer
	require.Equal(t, 2, runByHand(p, []string{"x", "--manifest"}, &out, &errs))
	require.Empty(t, out.String())
	p = servedPlugin()
	p.Schema = json.RawMessage(`{`)
	require.Equal(t, 1, runByHand(p, []string{"x", "--manifest"}, &out, &errs))
}

func TestProcessByHand(t *testing.T) {
	out, err := pluginCommand().CombinedOutput()
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 2, exit.ExitCode())
	require.Contains(t, string(out), "an inference engine starts it")

	out, err = pluginCommand("--manifest").Output()
	require.NoError(t, err)
	m, err := wire.ParseManifest(out)
	require.NoError(t, err)
	require.True(t, m.Name == "Served" && m.Answers("S") && m.Speaks(wire.ProtocolVersion))
	require.Equal(t, []string{"HOME"}, m.Environment)
	require.Contains(t, string(m.ConfigSchema), `"size"`)
	require.Contains(t, string(out), "\n  \"name\"", "indented")
}

// A real process: handshake, a worker session in memory that it inherited, logs with their levels,
// and a clean end.
func TestServeProcess(t *testing.T) {
	region, err := shm.Create("test", 8*testBlock)
	require.NoError(t, err)
	defer region.Close()
	cmd := pluginCommand()
	cmd.ExtraFiles = []*os.File{region.File()}
	logs := &testkit.Log{}
	client := plugin.NewClient(&plugin.ClientConfig{
		HandshakeConfig: wire.Handshake(), Plugins: plugin.PluginSet{wire.PluginName: &wire.Plugin{}}, Cmd: cmd,
		AllowedProtocols: []plugin.Protocol{plugin.ProtocolGRPC}, AutoMTLS: true, SkipHostEnv: true, GRPCDialOptions: wire.DialOptions(),
		Logger: hclog.New(&hclog.LoggerOptions{Level: hclog.Trace, Output: logs, JSONFormat: true}),
	})
	defer client.Kill()
	protocol, err := client.Client()
	require.NoError(t, err)
	raw, err := protocol.Dispense(wire.PluginName)
	require.NoError(t, err)
	conn, ok := raw.(*grpc.ClientConn)
	require.True(t, ok)

	p := &hostEnd{t: t, client: kvportv1.NewPluginClient(conn)}
	l := p.session()
	answer := l.call(openCall(kvportv1.Side_SIDE_WORKER, wire.Region{FD: 3, Size: region.Size()}))
	require.NotNil(t, answer.GetOpened(), "%v", answer.GetError())
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM)) // meant for the engine, which drains
	require.NoError(t, cmd.Process.Signal(syscall.SIGINT))
	region.Bytes()[32] = 77
	block := connector.Block{Key: connector.BlockKey{1}, ID: 1}
	save := loadCall(block)
	save.Call = &kvportv1.SessionRequest_Save{Save: save.GetLoad()}
	require.NotNil(t, l.call(save).GetMoved())
	block.ID = 2
	require.NotNil(t, l.call(loadCall(block)).GetMoved())
	require.Equal(t, byte(77), region.Bytes()[64], "the bytes went through the plugin")
	require.NotNil(t, l.call(closeCall()).GetClosed())
	client.Kill()
	require.True(t, client.Exited())

	levels := map[string]string{}
	lines := bufio.NewScanner(strings.NewReader(logs.String()))
	for lines.Scan() {
		var entry struct {
			Level   string `json:"@level"`
			Message string `json:"@message"`
		}
		require.NoError(t, json.Unmarshal(lines.Bytes(), &entry))
		levels[entry.Message] = entry.Level
	}
	require.Equal(t, "debug", levels["opened"])
	require.Equal(t, "warn", levels["by the default logger"])
	require.Equal(t, "error", levels["grouped"])
}

// A plugin whose host is gone does not stay behind, even if nobody hangs up on it.
func TestOrphanExits(t *testing.T) {
	// The shell is the parent; it dies while the plugin's pipes stay open.
	cmd := exec.Command("sh", "-c", `"$0" & echo $!; read line; kill -9 $$`, os.Args[0])
	cmd.Env = []string{asPlugin + "=1", wire.CookieKey + "=" + wire.CookieValue, "TMPDIR=" + t.TempDir()}
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	out := bufio.NewScanner(stdout)
	var pid int
	for line := ""; !strings.HasPrefix(line, "1|1|unix|"); line = out.Text() { // the handshake
		if n, _ := fmt.Sscanf(line, "%d", &pid); n == 1 && !strings.Contains(line, "|") {
			t.Log("plugin process", pid)
		}
		require.True(t, out.Scan(), "no handshake")
	}
	require.Positive(t, pid)
	_, err = io.WriteString(stdin, "\n")
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() { // the plugin holds the other end of the pipe until it exits
		defer close(ended)
		_, _ = io.Copy(io.Discard, stdout)
	}()
	limit, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	select {
	case <-ended:
	case <-limit.Done():
		t.Error("the orphan lives")
		if process, err := os.FindProcess(pid); err == nil {
			_ = process.Kill()
		}
	}
	<-ended
	require.Error(t, cmd.Wait(), "the shell was killed")
}

func TestLogLines(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(newLogHandler(&out))
	log.Log(t.Context(), slog.LevelDebug-4, "m", "long", strings.Repeat("x", 100<<10), "time", "mine", "@level", "forged")
	require.Less(t, out.Len(), 64<<10, "go-plugin reads lines up to 64 KiB")
	var line map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(out.Bytes(), &line))
	require.JSONEq(t, `"trace"`, string(line["@level"]))
	require.JSONEq(t, `"m"`, string(line["@message"]))
	require.JSONEq(t, `"mine"`, string(line["time"]))
	require.JSONEq(t, `"forged"`, string(line["_level"]))
	var stamp string
	require.NoError(t, json.Unmarshal(line["@timestamp"], &stamp))
	_, err := time.Parse("2006-01-02T15:04:05.000000Z07:00", stamp)
	require.NoError(t, err)
	for level, want := range map[slog.Level]string{slog.LevelDebug: "debug", slog.LevelInfo + 1: "info", slog.LevelWarn: "warn", slog.LevelError + 4: "error"} {
		require.Equal(t, want, hclogLevel(level))
	}
}
