import fedstrata as fs

files = "examples/hospitals/*.csv"  # one for each hospital
data = fs.data.from_csv(files, label="ill", encode=True, impute="mean", test_fraction=0.2)
data = fs.data.standardize(data).with_client_index()
model = fs.models.for_data("logistic", data)  # no intercept: "linear", loss="logistic" has one
problem = fs.dro.group(model.loss, groups=data.clients, lam=0.05, group_of=lambda patient: patient["client"])
result = fs.solve(problem, fs.FedDRO(eta=0.3, beta=1.0), data, model.init(0), rounds=400)
for i, name in enumerate(data.names):
    print(f"{name:12} {model.score(result.x, data.client(i)):.0%} right")
print(f"on patients that were held out {model.score(result.x, data.test):.0%}")
