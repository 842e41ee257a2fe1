package acceptance

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/kvport/kvport/verify/acceptance/rig"
)

// dynamo is how Dynamo's prefill workers choose the parameters of a handover, as its source says.
type dynamo struct {
	Source    string            `json:"source"`
	Protocols map[string]string `json:"protocols"` // by the name of vLLM's kv_connector
	Refusal   string            `json:"refusal"`
	Prefill   map[string]fields `json:"prefill"` // kv_transfer_params of the prefill worker's request, by protocol
}

// asDynamo reads what the source says.
func asDynamo(t *testing.T) *dynamo {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "foreign", "dynamo.json"))
	require.NoError(t, err)
	d := &dynamo{}
	require.NoError(t, json.Unmarshal(data, d))
	require.Contains(t, d.Source, "https://")
	for name, protocol := range d.Protocols {
		require.NotEmpty(t, d.Prefill[protocol], name)
	}
	return d
}

// params are those of a prefill worker whose vLLM has a connector.
func (d *dynamo) params(name string) (fields, error) {
	protocol, known := d.Protocols[name]
	if !known {
		list := "['" + strings.Join(slices.Sorted(maps.Keys(d.Protocols)), "', '") + "']"
		return nil, errors.New(strings.NewReplacer("NAME", name, "LIST", list).Replace(d.Refusal))
	}
	return maps.Clone(d.Prefill[protocol]), nil
}

// dynamoPage is what the page says: the beginning of the refusal, and the line that mends it.
type dynamoPage struct{ text, refusal, name, protocol string }

func readDynamoPage(t *testing.T) dynamoPage {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("..", "..", "docs", "dynamo.md"))
	require.NoError(t, err)
	line := regexp.MustCompile(`(?m)^KV_CONNECTOR_PROTOCOLS\["(\w+)"\] = (\w+)$`).FindAllStringSubmatch(string(data), -1)
	require.Len(t, line, 1, "one line mends it")
	refusal := regexp.MustCompile("`(Unsupported kv_connector[^`]*)`").FindStringSubmatch(string(data))
	require.NotNil(t, refusal)
	return dynamoPage{string(data), refusal[1], line[0][1], line[0][2]}
}

// worker is Dynamo's prefill and decode worker: the one's request has the parameters of its protocol, and the other's those of the answer. Between them is no
// HTTP, so that nothing else of a request is Dynamo's.
func (d *dynamo) worker(name string) (*foreign, error) {
	params, err := d.params(name)
	if err != nil {
		return nil, err
	}
	return &foreign{
		name: fmt.Sprintf("Dynamo, %s as %s", name, d.Protocols[name]), loads: true, noChats: true, decode: passOn,
		prefill: func(f fields, _ bool) {
			oneToken(f)
			f["kv_transfer_params"] = maps.Clone(params)
		},
	}, nil
}

// dynamoMain is what stands for Dynamo's worker where the page's script runs: it looks a connector up in the table, and prints the parameters of a handover.
const dynamoMain = `import json, sys
from dynamo.vllm.kv_connector_protocols import KV_CONNECTOR_PROTOCOLS
assert __name__ == "__main__", __name__
name = json.loads(sys.argv[sys.argv.index("--kv-transfer-config") + 1])["kv_connector"]
if name not in KV_CONNECTOR_PROTOCOLS:
    raise ValueError(name)
print(json.dumps(KV_CONNECTOR_PROTOCOLS[name].PREFILL))
`

// install writes a package that has the names of Dynamo's and what was written down of them, and gives the folder for PYTHONPATH.
func (d *dynamo) install(t *testing.T) (folder string) {
	t.Helper()
	var protocols strings.Builder
	protocols.WriteString("import json\n")
	for name, params := range d.Prefill {
		data, err := json.Marshal(params)
		require.NoError(t, err)
		fmt.Fprintf(&protocols, "class %s:\n    PREFILL = json.loads(%q)\n", name, data)
	}
	protocols.WriteString("KV_CONNECTOR_PROTOCOLS = {\n")
	for name, protocol := range d.Protocols {
		fmt.Fprintf(&protocols, "    %q: %s,\n", name, protocol)
	}
	protocols.WriteString("}\n")
	folder = t.TempDir()
	inner := filepath.Join(folder, "dynamo", "vllm")
	require.NoError(t, os.MkdirAll(inner, 0o700))
	for path, text := range map[string]string{
		filepath.Join(folder, "dynamo", "__init__.py"): "", filepath.Join(inner, "__init__.py"): "",
		filepath.Join(inner, "__main__.py"): dynamoMain, filepath.Join(inner, "kv_connector_protocols.py"): protocols.String(),
	} {
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	return folder
}

// TestForeignDynamoScript: the page's script makes a worker of Dynamo that knows our connector, and changes nothing for the others. Without it, or without
// its line, the worker refuses.
func TestForeignDynamoScript(t *testing.T) {
	d, page := asDynamo(t), readDynamoPage(t)
	folder, script := d.install(t), filepath.Join("testdata", "foreign", "dynamo_worker.py")
	code, err := os.ReadFile(script)
	require.NoError(t, err)
	require.Contains(t, page.text, "```python\n"+string(code)+"```")
	require.Contains(t, page.text, "`python3 "+filepath.Base(script)+"`")
	worker := func(connector string, how ...string) ([]byte, error) {
		args := slices.Concat(how, []string{"--kv-transfer-config", fmt.Sprintf(`{"kv_connector":%q}`, connector)})
		cmd := exec.CommandContext(t.Context(), "python3", args...)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+folder, "PYTHONDONTWRITEBYTECODE=1")
		return cmd.CombinedOutput()
	}
	known := maps.Clone(d.Protocols)
	known[page.name] = page.protocol
	for name, protocol := range known {
		out, err := worker(name, script)
		require.NoError(t, err, "%s", out)
		var params fields
		require.NoError(t, json.Unmarshal(out, &params), "%s", out)
		require.Equal(t, d.Prefill[protocol], params, name)
	}
	out, err := worker(page.name, "-m", "dynamo.vllm")
	require.Error(t, err)
	require.Contains(t, string(out), "ValueError: "+page.name)

	line := fmt.Sprintf("KV_CONNECTOR_PROTOCOLS[%q] = %s\n", page.name, page.protocol)
	for what, planted := range map[string]string{"no line": "", "another name": strings.Replace(line, page.name, page.name+"V2", 1)} {
		without := filepath.Join(t.TempDir(), "planted.py")
		require.NoError(t, os.WriteFile(without, []byte(strings.Replace(string(code), line, planted, 1)), 0o600))
		out, err := worker(page.name, without)
		require.Error(t, err, what)
		require.Contains(t, string(out), "ValueError: "+page.name, what)
	}
}

// TestForeignDynamo: Dynamo refuses our connector by its name, in the words of the page. With the page's line it hands over, as long as the line names the
// protocol that it names, and each of its parameters is what that protocol says.
func TestForeignDynamo(t *testing.T) {
	d, page := asDynamo(t), readDynamoPage(t)
	_, err := d.worker(page.name)
	require.ErrorContains(t, err, page.refusal)
	require.True(t, strings.HasPrefix(err.Error(), page.refusal))
	for name := range d.Protocols {
		require.Contains(t, page.text, "`"+name+"`")
	}

	d.Protocols[page.name] = page.protocol
	require.Contains(t, d.Prefill, page.protocol, "the line names a protocol that there is")
	_, err = d.worker(page.name + "V2")
	require.Error(t, err, "the line mends one name")
	router := func() *foreign {
		f, err := d.worker(page.name)
		require.NoError(t, err)
		return f
	}
	f := rig.Movers(t)[0]
	c := newContract(t, func(role string) string {
		return fmt.Sprintf(`{"kv_connector":%q,"kv_role":%q,"kv_connector_extra_config":%s}`, f.Connector, role, f.Setups[0].Config)
	})
	c.holds(router, c.check)
	c.planted(router, c.check, handedOver())

	for name, params := range d.Prefill { // planted: another protocol
		if name != page.protocol && params["transfer_id"] != nil {
			d.Protocols[page.name] = name
			require.ErrorContains(t, c.check(router()), "transfer_id", name)
		}
	}
	delete(d.Protocols, page.name) // planted: no line
	_, err = d.worker(page.name)
	require.Error(t, err)
}
