import fedstrata as fs

files = "examples/hospitals/*.csv"  # one for each hospital
data = fs.data.from_csv(files, label="ill", encode=True, impute="mean", test_fraction=0.2)
data = fs.data.standardize(data).with_client_index()
model = fs.models.for_data("linear", data, loss="logistic")
problem = fs.dro.group(model.loss, groups=data.clients, lam=0.05, group_of=lambda patient: patient["client"])
result = fs.solve(problem, fs.FedDRO(eta=0.3, beta=1.0), data, model.init(0), rounds=400)
print("held-out patients, and for how many of them the model is right")
for i, name in enumerate(data.names):
    theirs = {key: values[data.test["client"] == i] for key, values in data.test.items()}
    print(f"{name:12}{len(theirs['y']):4}  {model.score(result.x, theirs):.0%}")
